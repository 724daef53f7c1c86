"""Requests of public traces: when they come, how long prompt and answer are, and what prompts share.

Two forms are read: Azure's CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`) and Mooncake's JSON lines (`timestamp` in
ms, `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens; equal ids are equal prefixes).
"""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from stoker.router.prefix_index import MAX_PIECES, PIECE_BYTES
from stoker.router.work import BYTES_PER_TOKEN

HASH_TOKENS = 512


@dataclass(frozen=True)
class TracedRequest:
    """One request."""

    number: int
    at_s: float
    prompt: int
    """Tokens."""
    output: int
    hash_ids: tuple[int, ...] = ()

    def tokens(self) -> tuple[int, ...]:
        """A prompt with the right sharing: by the trace's ids, or with none."""
        if not self.hash_ids:
            return (self.number + (1 << 40),) * self.prompt
        parts = [token for found in self.hash_ids for token in (found,) * HASH_TOKENS]
        return tuple(parts[: self.prompt])

    def chain(self) -> tuple[int, ...]:
        """Keys of its beginnings for a router: one for each piece of `PIECE_BYTES`, from the trace's ids."""
        pieces = HASH_TOKENS * BYTES_PER_TOKEN // PIECE_BYTES
        most = min(self.prompt * BYTES_PER_TOKEN // PIECE_BYTES, MAX_PIECES)
        keys = (hash((found, part)) & (1 << 64) - 1 for found in self.hash_ids for part in range(pieces))
        return tuple(key or 1 for key in itertools.islice(keys, most))


def read_trace(path: Path) -> list[TracedRequest]:
    """Read a trace by its suffix, from time 0, in the order of arrival."""
    found = _azure(path) if path.suffix == ".csv" else _mooncake(path)
    first = min(request.at_s for request in found)
    ordered = sorted(found, key=lambda request: request.at_s)
    return [replace(request, number=number, at_s=request.at_s - first) for number, request in enumerate(ordered)]


def multiplied(requests: Sequence[TracedRequest], copies: int, jitter_s: float, seed: int = 0) -> list[TracedRequest]:
    """The trace at `copies` times its rate: each request so often, each copy up to `jitter_s` later."""
    chance = random.Random(seed)
    made = [
        replace(request, at_s=request.at_s + (chance.uniform(0, jitter_s) if copy else 0.0))
        for request in requests
        for copy in range(copies)
    ]
    return _numbered(made)


def repeated(
    requests: Sequence[TracedRequest], seconds: float, share: Callable[[float], float], seed: int = 0
) -> list[TracedRequest]:
    """The trace again and again for `seconds`, each request kept with the probability `share(time)`."""
    chance = random.Random(seed)
    length = requests[-1].at_s
    made: list[TracedRequest] = []
    begin_s = 0.0
    while begin_s < seconds:
        moved = (replace(request, at_s=begin_s + request.at_s) for request in requests)
        made += [request for request in moved if request.at_s < seconds and chance.random() < share(request.at_s)]
        begin_s += length
    return _numbered(made)


def conversations(count: int, turns: int, rate: float, seed: int = 0) -> list[TracedRequest]:
    """Conversations whose turns come at random, `rate` requests/s in all: each prompt is the one before with 1,024 to
    3,072 tokens more."""
    chance = random.Random(seed)
    ids, now_s, made = itertools.count(1), 0.0, list[TracedRequest]()
    known: list[tuple[int, ...]] = [()] * count
    order = [talk for talk in range(count) for _ in range(turns)]
    chance.shuffle(order)
    for talk in order:
        now_s += chance.expovariate(rate)
        known[talk] += tuple(itertools.islice(ids, chance.randint(2, 6)))
        made.append(TracedRequest(0, now_s, HASH_TOKENS * len(known[talk]), chance.randint(16, 128), known[talk]))
    return _numbered(made)


def _numbered(requests: Iterable[TracedRequest]) -> list[TracedRequest]:
    ordered = sorted(requests, key=lambda request: request.at_s)
    return [replace(request, number=number) for number, request in enumerate(ordered)]


def _azure(path: Path) -> list[TracedRequest]:
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return [
        TracedRequest(0, at_s, max(int(row["ContextTokens"]), 1), max(int(row["GeneratedTokens"]), 1))
        for at_s, row in zip(times, rows, strict=True)
    ]


def _mooncake(path: Path) -> list[TracedRequest]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        length, ids = max(row["input_length"], 1), tuple(row["hash_ids"])
        found.append(TracedRequest(0, row["timestamp"] / 1000, length, max(row["output_length"], 1), ids))
    return found
