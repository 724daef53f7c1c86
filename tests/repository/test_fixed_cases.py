"""`make test` judges by the same cases of each property, whatever else is imported or has changed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

FIXED = settings.get_current_profile_name() == "fixed"


def cases() -> list[int]:
    found = []

    @settings(derandomize=True, database=None, max_examples=300)
    @given(st.integers())
    def collect(value: int) -> None:
        found.append(value)

    collect()
    return found


def import_literals(folder: Path) -> None:
    """Import a module that has literals of its own, as any change of the product brings some."""
    file = folder / "literals_of_a_change.py"
    file.write_text(f"NUMBERS = {list(range(7_000_000, 7_000_400))}\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[file.stem])


@pytest.mark.skipif(not FIXED, reason="random cases were asked for")
def test_a_property_keeps_its_cases_when_modules_change(tmp_path: Path) -> None:
    before = cases()
    import_literals(tmp_path)
    assert cases() == before


def test_cases_are_fixed_unless_random_ones_were_asked_for() -> None:
    assert settings.default is not None
    assert settings.default.derandomize is FIXED
