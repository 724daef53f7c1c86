"""A core without a model, over the real wire: the prompt determines its output."""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from stoker.engine.core.messages import (
    Abort,
    AddRequest,
    CoreState,
    Delta,
    Drain,
    Finish,
    Heartbeat,
    Hello,
    Inspect,
    Inspected,
    Message,
    ModelFacts,
    Outputs,
    Refused,
    RequestFacts,
    RequestProgress,
    RequestState,
    Stop,
    pack,
    unpack,
)
from stoker.engine.core.stats import Stats
from stoker.engine.execution.step import TokenLogprobs

BOS, EOS, VOCABULARY = 256, 257, 258
MAX_MODEL_LEN = 200
QUIET_S = 60.0
"""The silence that this core promises to keep below: no pause of a busy machine is so long."""
BEAT_S = 0.2
HELD_AT = 3
"""Tokens that a held choice has sent."""


class ByteCodec:
    """A tokenizer whose tokens are bytes; BOS and EOS are special."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    has_chat_template = True
    template_source: str | None = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self._shown(token, skip_special_tokens) for token in tokens).decode(errors="replace")

    def detokenizer(self, *, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> ByteDetokenizer:
        return ByteDetokenizer(self, skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        return self._shown(token, False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        if any(message["role"] == "martian" for message in messages):
            raise ValueError("the template knows no role martian")
        tools = "".join(f"<tool>{tool['function']['name']}" for tool in settings.get("tools") or ())
        text = tools + "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return text + "<assistant>" if settings["add_generation_prompt"] else text

    def _shown(self, token: int, skip: bool) -> bytes:
        special = {BOS: b"<s>", EOS: b"</s>"}
        return bytes([token]) if token < 256 else b"" if skip else special[token]


class ByteDetokenizer:
    def __init__(self, codec: ByteCodec, skip: bool) -> None:
        self._codec, self._skip = codec, skip
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._codec._shown(token, self._skip))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


FACTS = ModelFacts(
    path="/models/tiny", tokenizer_folder="/nowhere", digest="abcdef0123456789", dtype="float32", vocab_size=VOCABULARY,
    max_model_len=MAX_MODEL_LEN, eos_token_ids=(EOS,), block_size=16, num_blocks=64, step_tokens=64,
)  # fmt: skip


def scored(token: int, count: int) -> TokenLogprobs:
    """Return log-probability -token/100 and `count` made-up alternatives."""
    top = tuple(((token + i) % VOCABULARY, -(token + i) / 100) for i in range(count))
    return TokenLogprobs(-token / 100, top, token + 1)


class FakeCore:
    """A core that outputs the text after `say:` in the prompt, then EOS; choice `c` > 0 has its number before it.

    Words in the prompt: `refuse` (queue_full), `badgrammar` (its grammar is refused), `exitN` (the process ends with
    code N), `fail` (error after 3 tokens), `slow` (one token every 20 ms), `held` (3 tokens, the others once the test
    says so: `release`), `hang`.
    """

    def __init__(self, address: str, facts: ModelFacts = FACTS, quiet_s: float = QUIET_S) -> None:
        self.facts, self.quiet_s = facts, quiet_s
        self._released = released_file(address)
        self.running: set[str] = set()
        self.most_running = 0
        self.aborted: list[str] = []
        self.finished: list[tuple[str, int]] = []
        self.requests: list[AddRequest] = []
        self.stopped = asyncio.Event()
        self.progress: RequestState = "DECODING"
        """What an inspection of a running request finds."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # as a core's: a full queue would lose deltas
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._front = b""
        self.state = CoreState("Serving", "", facts)
        self._loop = asyncio.create_task(self._serve())

    async def close(self) -> None:
        for task in [self._loop, *self._tasks.values()]:
            task.cancel()
        await asyncio.gather(self._loop, *self._tasks.values(), return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def send(self, message: Message) -> None:
        await self._socket.send_multipart([self._front, pack(message)])

    async def set_state(self, state: CoreState) -> None:
        self.state = state
        await self.send(state)

    async def _serve(self) -> None:
        while True:
            front, frame = await self._socket.recv_multipart()
            message = unpack(frame)
            if isinstance(message, Hello):
                self._front = front
                await self.send(self.state)
                await self.send(self.stats())
                self._tasks.setdefault("heart", asyncio.create_task(self._beat()))
            elif isinstance(message, AddRequest):
                self.requests.append(message)
                self._tasks[message.request_id] = asyncio.create_task(self._answer(message))
            elif isinstance(message, Abort):
                self.aborted += message.request_ids
                for request_id in message.request_ids:
                    self._tasks[request_id].cancel()
                    self.running.discard(request_id)
            elif isinstance(message, Finish):
                self.finished.append((message.request_id, message.choice))
            elif isinstance(message, Inspect):
                known = [
                    RequestProgress(one, self.progress, 0, 1) for one in message.request_ids if one in self.running
                ]
                await self.send(Inspected(message.query, tuple(known)))
            elif isinstance(message, Drain):
                await self.set_state(CoreState("Draining", "draining", self.facts))
                self._tasks["drain"] = asyncio.create_task(self._drain(message.deadline_s))
            elif isinstance(message, Stop):
                self.stopped.set()

    async def _beat(self) -> None:
        while True:
            await self.send(Heartbeat(self.quiet_s, 0.03))
            await asyncio.sleep(BEAT_S)

    async def _drain(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while self.running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for request in [request for request in self.requests if request.request_id in self.running]:
            self._tasks[request.request_id].cancel()
            await self.send(_last(request, 0, "abort", 1))
        await self.set_state(CoreState("Drained", "", self.facts))

    def stats(self) -> Stats:
        return Stats(
            time_s=time.monotonic(), steps=5, progressed_s=time.monotonic(), running=len(self.running), waiting=2,
            total_blocks=64,
            free_blocks=40, cached_blocks=8, owned_blocks=16, prompt_tokens=100, generation_tokens=50, preemptions=3,
            prefix_queries=90, prefix_hits=30, finished={"stop": 4, "length": 1, "abort": 0, "error": 0}, refused={},
            step_tokens=(2, 2, 0, 0, 0, 1, *(0,) * 8), step_tokens_sum=150, block_audits=3, leaked_blocks=0,
            prompt_tokens_per_s=40.0, generation_tokens_per_s=20.0, num_devices=4, busy_s=1.5,
        )  # fmt: skip

    async def _answer(self, request: AddRequest) -> None:
        text = bytes(token for token in request.prompt_tokens if token < 256).decode(errors="replace")
        if "exit" in text:
            os._exit(int(text.rpartition("exit")[2]))
        if "refuse" in text:
            await self.send(Refused(request.request_id, "queue_full", "4 requests wait already"))
            return
        if "badgrammar" in text and request.params.grammar is not None:
            field = request.params.grammar.field
            await self.send(Refused(request.request_id, "invalid", f"{field} cannot be used", field))
            return
        self.running.add(request.request_id)
        self.most_running = max(self.most_running, len(self.running))
        open_ones = [c for c in range(request.params.n) if not request.resumed or request.resumed[c] is not None]
        await asyncio.gather(*(self._choice(request, text, choice) for choice in open_ones))
        self.running.discard(request.request_id)

    async def _choice(self, request: AddRequest, text: str, choice: int) -> None:
        params = request.params
        said = text.rpartition("say:")[2].removesuffix("<assistant>")
        script = [*(f"{choice}{said}" if choice else said).encode(), EOS]
        sent = (request.resumed[choice] if request.resumed else None) or ()
        for number in range(len(sent), len(script)):
            await asyncio.sleep(600 if "hang" in text else 0.02 if "slow" in text else 0)
            while "held" in text and number == HELD_AT and not self._released.exists():
                await asyncio.sleep(0.01)
            token = script[number]
            if "lost" in text and number == 3:
                return await self.send(_last(request, choice, "error", number, error="RankFailed: rank 1 has ended"))
            if "fail" in text and number == 3:
                return await self.send(_last(request, choice, "error", number, error="the logits are not finite"))
            if token == EOS:
                return await self.send(_last(request, choice, "stop", number + 1, stop_token=EOS))
            prompt = None
            if params.prompt_logprobs is not None and choice == 0 and number == 0:
                prompt = (None, *(scored(t, params.prompt_logprobs) for t in request.prompt_tokens[1:]))
            full = number + 1 >= (params.max_tokens if params.max_tokens is not None else len(script) + 1)
            shown = () if params.prompt_only else (token,)
            await self.send(
                Outputs(
                    (
                        Delta(
                            request_id=request.request_id,
                            choice=choice,
                            tokens=shown,
                            logprobs=tuple(scored(one, params.logprobs) for one in shown)
                            if params.logprobs is not None
                            else None,
                            prompt_logprobs=prompt,
                            finish_reason="length" if full else None,
                            facts=_facts(request, number + len(shown)) if full or number == len(sent) else None,
                        ),
                    )
                )
            )
            if full:
                return None
        return None


def _last(
    request: AddRequest,
    choice: int,
    reason: str,
    count: int,
    *,
    stop_token: int | None = None,
    error: str | None = None,
) -> Outputs:
    facts, alternatives = _facts(request, count), request.params.logprobs
    scores = (scored(stop_token, alternatives),) if stop_token is not None and alternatives is not None else None
    return Outputs((Delta(request.request_id, choice, (), scores, None, reason, stop_token, error, facts),))  # type: ignore[arg-type]


def _facts(request: AddRequest, count: int) -> RequestFacts:
    now = time.monotonic()
    return RequestFacts(len(request.prompt_tokens), 2, count, 0, request.arrival_s, now, now, now, now)


def released_file(address: str) -> Path:
    """The file whose presence releases what a core at this address holds."""
    return Path(address.removeprefix("ipc://")).with_name("released")


def release(folder: Path) -> None:
    """Let the cores with sockets in this folder go on with what they hold, now and later."""
    (folder / "released").touch()


async def main(address: str, quiet_s: float = QUIET_S) -> None:
    """Run the core process of a program under test. Once it was stopped and goes on, it promises no short silences."""
    core = FakeCore(address, quiet_s=quiet_s)

    def calm() -> None:
        core.quiet_s = QUIET_S

    asyncio.get_running_loop().add_signal_handler(signal.SIGCONT, calm)
    await core.stopped.wait()
    await core.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(float, sys.argv[2:])))
