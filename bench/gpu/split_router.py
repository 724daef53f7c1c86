"""The router of a mode of `pd_goodput`: every request is split, whatever that costs.

python -m bench.gpu.split_router --config router.json
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from stoker.pod.config_file import load
from stoker.router.__main__ import run
from stoker.router.config import RouterConfig
from stoker.router.pairs import Pair, PairPolicy
from stoker.router.snapshot import load_snapshot
from stoker.router.work import Work


class AlwaysSplit(PairPolicy):
    """An engine for answers, and one for prompts."""

    def __call__(self, ready: Sequence[Any], turn: int, work: Work) -> Any:
        return self.pair(ready, (), turn, work).answers

    def pair(self, ready: Sequence[Any], helpers: Sequence[Any], turn: int, work: Work) -> Pair[Any]:
        able = [one for one in ready if one.role == "decode"] or list(ready)
        answers = able[turn % len(able)]
        others = [one for one in helpers if one.role == "prefill" and one is not answers]
        return Pair(answers, others[turn % len(others)] if others else None, work.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    logging.basicConfig(level=logging.INFO)
    config = load(RouterConfig, parser.parse_args().config)
    asyncio.run(run(config, load_snapshot(config.backends_file), pod_uid="", policy=AlwaysSplit()))


if __name__ == "__main__":
    main()
