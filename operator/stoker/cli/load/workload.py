"""What a bench asks, and when: drawn at random, read from a file of prompts, or from a trace. Pure.

A prompt is a list of token ids, or words of which most tokenizers make one token each; the server's own count is
what is reported. The same seed gives the same requests.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stoker.pod.token_lengths import TokenLengths

Kind = Literal["ids", "words"]
Prompt = list[int] | str

FIRST_ID = 100
"""Token ids below it are often special ones."""
TRACE_BLOCK = 512
"""Tokens behind one entry of `hash_ids` in a trace of Mooncake's form."""
LATEST_MS = 1e15
"""Of a trace's times, some of which count from 1970."""
COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face others level"
)


@dataclass(frozen=True)
class Request:
    """One request."""

    due_s: float
    """Seconds after the begin."""
    prompt: Prompt | list[dict[str, Any]]
    """A list of messages comes from a file."""
    max_tokens: int


class Writer:
    """Makes prompts of one kind. `vocabulary`: token ids are below it."""

    def __init__(self, kind: Kind, seed: int | str, vocabulary: int) -> None:
        self.kind, self.seed, self.vocabulary = kind, seed, vocabulary
        self._words = COMMON_WORDS.split()

    def tokens(self, name: str, count: int) -> list[int] | list[str]:
        """The tokens of a name: always the same."""
        rng = random.Random(f"{self.seed}/{name}")
        if self.kind == "ids":
            return [rng.randrange(FIRST_ID, self.vocabulary) for _ in range(count)]
        return rng.choices(self._words, k=count)

    def prompt(self, parts: Iterable[Sequence[int] | Sequence[str]]) -> Prompt:
        joined: list[Any] = list(itertools.chain.from_iterable(parts))
        return joined if self.kind == "ids" else " ".join(joined)


def arrivals(count: int, rate: float, burstiness: float, seed: int | str) -> list[float]:
    """Seconds at which requests are due.

    Pauses have a gamma distribution with this shape: 1 is a Poisson process, more is more even, less comes in bursts.
    They are stretched so that the last request is due after `count / rate` seconds: by chance alone a few hundred
    requests come 5 % or 10 % faster than asked, which at high load is a different measurement. An infinite rate is all
    at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(f"{seed}/arrivals")
    at = list(itertools.accumulate(rng.gammavariate(burstiness, 1.0) for _ in range(count)))
    last = at[-1] or 1.0  # pauses of a tiny shape may all be too short for a number
    return [count / rate * (one / last) for one in at]


def drawn(
    writer: Writer, due_s: Sequence[float], own: TokenLengths, output: TokenLengths, shared: int
) -> Iterator[Request]:
    """Random prompts whose first `shared` tokens are the same in all."""
    rng = random.Random(f"{writer.seed}/lengths")
    beginning = writer.tokens("shared", shared)
    for number, at in enumerate(due_s):
        prompt = writer.prompt((beginning, writer.tokens(f"own {number}", own.draw(rng))))
        yield Request(at, prompt, output.draw(rng))


def of_dataset(lines: Iterable[str], due_s: Sequence[float], output: TokenLengths, seed: int) -> Iterator[Request]:
    """Prompts of a file with one JSON object a line: `prompt` (text or ids) or `messages`; maybe `max_tokens`.

    The file begins again where there are fewer lines than times.

    Raises:
        ValueError: names the line.
    """
    rows = [(number, _object(number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ValueError("the file has no line")
    rng = random.Random(f"{seed}/lengths")
    for at, (number, row) in zip(due_s, itertools.cycle(rows), strict=False):
        prompt = row.get("prompt", row.get("messages"))
        if not isinstance(prompt, str | list) or not prompt:
            raise ValueError(f"line {number}: prompt or messages is needed")
        yield Request(at, prompt, _positive(row, "max_tokens", number) or output.draw(rng))


def of_trace(writer: Writer, lines: Iterable[str], count: int | None, speed: float) -> Iterator[Request]:
    """Requests of a trace in Mooncake's form, `speed` times as fast.

    A line has `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, of which each stands for 512 tokens
    that are the same wherever it comes again. The earliest request is due at once: a part of a trace can be sent.

    Raises:
        ValueError: names the line, or says that there is none.
    """
    given = ((number, _object(number, line)) for number, line in enumerate(lines, 1) if line.strip())
    rows = list(itertools.islice(given, count))
    if not rows:
        raise ValueError("the file has no line")
    first_ms = min(_timestamp(row, number) for number, row in rows)
    for number, row in rows:
        length = _positive(row, "input_length", number, needed=True)
        hashes = row.get("hash_ids", [])
        whole = [*itertools.chain.from_iterable(writer.tokens(f"block {one}", TRACE_BLOCK) for one in hashes)][:length]
        rest = writer.tokens(f"rest {number}", length - len(whole))
        prompt = writer.prompt((whole, rest))  # type: ignore[arg-type]  # both are of one kind
        due_s = (row["timestamp"] - first_ms) / 1000 / speed
        yield Request(due_s, prompt, _positive(row, "output_length", number, needed=True))


def _timestamp(row: dict[str, Any], number: int) -> float:
    """Return the time of a line, whose hash ids are checked, too. Raises ValueError."""
    at = row.get("timestamp")
    if not isinstance(row.get("hash_ids", []), list) or not isinstance(at, int | float) or not abs(at) < LATEST_MS:
        raise ValueError(f"line {number}: a timestamp in milliseconds and a list of hash_ids are needed")
    return at


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError with the place."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where}: a JSON object is needed (got {text.strip()[:80]})")
    return found


def _object(number: int, line: str) -> dict[str, Any]:
    return parse_object(line, f"line {number}")


def _positive(row: dict[str, Any], name: str, number: int, *, needed: bool = False) -> int:
    """Return a count above 0; 0 where there is none and none is needed."""
    found = row.get(name)
    if found is None and not needed:
        return 0
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"line {number}: {name} must be a whole number above 0 (got {json.dumps(found)})")
    return found
