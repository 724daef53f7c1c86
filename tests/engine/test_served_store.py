"""A store that vanishes, comes back, hangs and goes on, under an engine's load: no request fails, no answer differs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from testing.engine.transfers import wait_for
from tests.engine.test_handover_served import Fleet, Served, answers

START_S = 600.0
PROMPTS = [[3 + (7 + number) * place % 290 for place in range(60)] for number in range(6)]
"""90 blocks, of which cache and host tier keep half."""


class Load:
    """Asks for all prompts in turn, in a thread, until it is left."""

    def __init__(self, served: Served) -> None:
        self.url, self.failures, self.answered = served.url, list[str](), 0
        self.expected = [self._ask(prompt) for prompt in PROMPTS]
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def more(self, count: int) -> None:
        """Wait for so many further answers."""
        until = self.answered + count
        wait_for(lambda: self.answered >= until or bool(self.failures), "answers", START_S)
        assert self.failures == []

    def _run(self) -> None:
        while not self._ends.is_set():
            for prompt, expected in zip(PROMPTS, self.expected, strict=True):
                self._note(prompt, expected)
            self._ask([self.answered % 290 + 3] * 20)  # new blocks, so that the store is written, too

    def _note(self, prompt: list[int], expected: str) -> None:
        try:
            found = self._ask(prompt)
        except (httpx.HTTPError, AssertionError) as error:
            found = repr(error)
        if found != expected:
            self.failures.append(found)
        self.answered += 1

    def _ask(self, prompt: list[int]) -> str:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "volume").mkdir()
    fleet = Fleet(tmp_path)
    cache = {
        "num_blocks": 24, "block_size": 4, "host_memory_bytes": 40960, "preemption": "swap",
        "store": {"paths": [str(tmp_path / "volume")], "bytes": 1 << 24},  # evicts none
    }  # fmt: skip
    try:
        made = fleet.start("s", "colocated", cache=cache)
        wait_for(answers(made), "a ready engine", START_S)
        yield made
    finally:
        fleet.close()


def store_of(served: Served) -> dict[str, Any]:
    return dict(served.status()["store"])


def test_no_request_fails_while_the_store_is_gone_or_hangs(served: Served, tmp_path: Path) -> None:
    volume, away = tmp_path / "volume", tmp_path / "away"
    with Load(served) as load:
        wait_for(lambda: store_of(served)["loaded"] > 0, "a block from the store", START_S)

        volume.rename(away)
        wait_for(lambda: store_of(served)["state"] != "ok", "a store that is left out", START_S)
        load.more(6)
        away.rename(volume)
        wait_for(lambda: store_of(served)["state"] == "ok", "the store again", START_S)

        hung = [Pipe(file) for file in volume.glob("store-*/??/*")]
        assert hung
        wait_for(lambda: "hangs" in store_of(served)["state"], "a store that hangs", START_S)
        load.more(6)
        for pipe in hung:
            pipe.restore()
        before = store_of(served)["loaded"]

        def goes_on() -> bool:
            for pipe in hung:
                pipe.release()
            store = store_of(served)
            return bool(store["state"] == "ok" and store["loaded"] > before)

        wait_for(goes_on, "a store that goes on", START_S)
        load.more(6)
    assert load.failures == []


class Pipe:
    """A block's file as one whose reader waits forever."""

    def __init__(self, file: Path) -> None:
        self.file, self.kept, self.pipe = file, file.read_bytes(), file.with_name(f"{file.name}.pipe")
        os.mkfifo(self.pipe)
        self.pipe.replace(file)

    def restore(self) -> None:
        """Put the block back, for readers that come now; those that wait are let go by `release`."""
        whole = self.file.with_name(f"{self.file.name}.whole")
        whole.write_bytes(self.kept)
        self.file.rename(self.pipe)
        whole.rename(self.file)

    def release(self) -> None:
        with suppress(OSError):  # none waits
            os.close(os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK))
