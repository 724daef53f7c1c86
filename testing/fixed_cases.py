"""The cases of property tests where every run judges the same ones."""

from __future__ import annotations

from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants


def draw_from_tests_alone() -> None:
    """Let the cases of a derandomized test depend on its source and on Hypothesis' version only.

    One draw of twenty is a literal of a module that has been imported. The cases would depend on which tests the
    process ran before, and a new literal anywhere in the product would draw other cases for every property.

    No process looks for such literals either: it would parse every module of the product and of the tests.
    """
    providers._get_local_constants = Constants
