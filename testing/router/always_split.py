"""A policy that splits every request, whatever that costs, so that nothing depends on measured rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.router.pairs import Pair, PairPolicy
from stoker.router.work import Work


class AlwaysSplit(PairPolicy):
    """Decode engines in turn, with the prefill engine, where there is one."""

    def __call__(self, ready: Sequence[Any], turn: int, work: Work) -> Any:
        return self.pair(ready, (), turn, work).answers

    def pair(self, ready: Sequence[Any], helpers: Sequence[Any], turn: int, work: Work) -> Pair[Any]:
        able = [one for one in ready if one.role == "decode"] or list(ready)
        answers = able[turn % len(able)]
        others = [one for one in helpers if one.role == "prefill" and one is not answers]
        return Pair(answers, others[turn % len(others)] if others else None, work.tokens)
