"""`stoker bench serve`: what it asks, when it sends, and what it makes of answers of every form."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.cli.load.exchange import Answer, Target, address_of, events_of
from stoker.cli.load.figures import figures, most_at_once
from stoker.cli.load.main import main
from stoker.cli.load.sending import send_all
from stoker.cli.load.workload import TRACE_BLOCK, Writer, arrivals, drawn, of_dataset, of_trace
from stoker.pod.token_lengths import TokenLengths
from testing.cli.small_disk import room_for

IDS = Writer("ids", 0, 1000)
FIVE = TokenLengths(5, 5)


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "5:4", "3:", ":7", "1:2:3", "1.5"])
def test_lengths_that_are_none_are_refused_by_their_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"got '"):
        TokenLengths.parse(text)


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 9))
def test_drawn_lengths_are_within_their_bounds(low: int, more: int, seed: int) -> None:
    lengths = TokenLengths.parse(f"{low}:{low + more}")
    assert low <= lengths.draw(random.Random(seed)) <= low + more


@given(st.floats(0.5, 100), st.sampled_from([0.5, 1.0, 4.0]))
def test_requests_come_at_the_rate_and_in_order(rate: float, burstiness: float) -> None:
    due_s = arrivals(2000, rate, burstiness, 0)
    assert due_s == sorted(due_s)
    assert due_s == arrivals(2000, rate, burstiness, 0)
    assert due_s[999] == pytest.approx(1000 / rate, rel=0.15)


@given(st.integers(1, 300), st.floats(0.5, 100), st.sampled_from([0.1, 1.0, 9.0]), st.integers(0, 9))
def test_few_requests_come_at_the_rate_too(count: int, rate: float, burstiness: float, seed: int) -> None:
    assert arrivals(count, rate, burstiness, seed)[-1] == pytest.approx(count / rate)


def test_without_a_rate_all_are_due_at_once() -> None:
    assert arrivals(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["ids", "words"])
def test_prompts_share_their_beginning_and_nothing_else(kind: Any) -> None:
    made = [list(drawn(Writer(kind, seed, 1000), [0.0] * 20, FIVE, FIVE, 3)) for seed in (0, 0, 1)]
    first, again, other = ([_tokens(one.prompt) for one in requests] for requests in made)
    assert first == again
    assert {len(prompt) for prompt in first} == {8}
    assert len({tuple(prompt[:3]) for prompt in first}) == 1
    assert len({tuple(prompt[3:]) for prompt in first}) == 20
    assert first[0][:3] != other[0][:3]


def _tokens(prompt: Any) -> list[Any]:
    return prompt.split() if isinstance(prompt, str) else list(prompt)


def test_a_trace_repeats_its_blocks_and_keeps_its_times() -> None:
    rows = [(0, 600, [7, 8]), (500, 512, [7]), (1000, 1100, [7, 9, 8])]
    lines = [
        json.dumps({"timestamp": at, "input_length": length, "output_length": 3, "hash_ids": hashes})
        for at, length, hashes in rows
    ]
    found = list(of_trace(IDS, lines, None, speed=2.0))
    assert [one.due_s for one in found] == [0.0, 0.25, 0.5]
    assert [len(one.prompt) for one in found] == [600, 512, 1100]
    first, second, third = (_tokens(one.prompt) for one in found)
    assert first[:TRACE_BLOCK] == second == third[:TRACE_BLOCK]
    assert first[TRACE_BLOCK:][:76] == third[2 * TRACE_BLOCK :] != third[TRACE_BLOCK:][:76]
    assert len(list(of_trace(IDS, lines, 2, 1.0))) == 2
    part = list(of_trace(IDS, ["", lines[1], "\n", lines[2]], None, 1.0))
    assert [one.due_s for one in part] == [0.0, 0.5], "a part of a trace begins at once"
    assert [len(one.prompt) for one in part] == [512, 1100]


def test_a_trace_without_order_begins_with_its_earliest_request() -> None:
    lines = [json.dumps({"timestamp": at, "input_length": 3, "output_length": 1}) for at in (1000, 0, 500)]
    assert [one.due_s for one in of_trace(IDS, lines, None, 1.0)] == [1.0, 0.0, 0.5]
    assert [one.due_s for one in of_trace(IDS, lines, 1, 1.0)] == [0.0]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 1: no JSON"),
        ('{"timestamp": NaN, "input_length": 4, "output_length": 1}', "line 1: a timestamp in milliseconds"),
        ('{"timestamp": 1e999, "input_length": 4, "output_length": 1}', "line 1: a timestamp in milliseconds"),
        ("[]", "line 1: a JSON object is needed"),
        ('{"input_length": 3, "output_length": 1}', "line 1: a timestamp in milliseconds"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1}', "line 1: input_length must be a whole number"),
        ('{"timestamp": 0, "input_length": 4, "output_length": "x"}', 'output_length must be .*got "x"'),
        (" ", "the file has no line"),
    ],
)
def test_a_line_that_is_no_request_is_named(line: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        list(of_trace(IDS, [line], None, 1.0))


def test_a_file_of_prompts_begins_again() -> None:
    lines = ['{"prompt": "a"}', "", '{"prompt": [1, 2], "max_tokens": 9}']
    found = list(of_dataset(lines, [0.0, 1.0, 2.0], FIVE, 0))
    assert [(one.due_s, one.prompt, one.max_tokens) for one in found] == [(0, "a", 5), (1, [1, 2], 9), (2, "a", 5)]
    for bad, text in (('{"prompt": ""}', "line 1: prompt or messages"), ("", "the file has no line")):
        with pytest.raises(ValueError, match=text):
            list(of_dataset([bad], [0.0], FIVE, 0))


def answer(sent_s: float, stamps: list[float], tokens: int, error: str = "") -> Answer:
    end_s = stamps[-1] if stamps else sent_s
    return Answer(sent_s - 0.002, 4, 0.001, sent_s, stamps, 10, 4, tokens, end_s, error)


def test_figures_by_hand() -> None:
    answers = [answer(1.0, [1.1, 1.2, 1.4], 4), answer(1.3, [1.35, 1.45], 2), answer(1.4, [], 0, "HTTP 429: full")]
    found = figures(answers, {"ttft": 60.0, "gap": 150.0})
    assert (found["requests"], found["failed"], found["short"], found["most_at_once"]) == (3, 1, 1, 2)
    assert found["errors"] == {"HTTP 429: full": 1}
    assert (found["input_tokens"], found["cached_tokens"], found["output_tokens"]) == (20, 8, 6)
    assert found["duration_s"] == 0.45
    assert found["output_tokens_per_s"] == pytest.approx(6 / 0.45, abs=0.01)
    assert (found["ttft_ms"]["mean"], found["ttft_ms"]["max"]) == (75.0, 100.0)
    assert (found["tpot_ms"]["p50"], found["tpot_ms"]["mean"]) == (100.0, 100.0), "by tokens, not by events"
    assert (found["gap_ms"]["p50"], found["gap_ms"]["max"]) == (100.0, 200.0)
    assert found["late_ms"]["max"] == 2.0
    assert found["goodput"] == {
        "goals_ms": {"ttft": 60.0, "gap": 150.0},
        "requests_per_s": pytest.approx(1 / 0.45, abs=0.01),
        "share": 0.3333,
    }


def test_without_an_answer_there_are_no_times() -> None:
    found = figures([answer(1.0, [], 0, "no")], {})
    assert (found["failed"], found["ttft_ms"], found["output_tokens_per_s"]) == (1, {}, 0.0)
    assert most_at_once([]) == 0


# A server of which a test says every byte.

Reply = Callable[[bytes, asyncio.StreamWriter], Any]


class Fake:
    """Answers each request with `reply`; keeps heads and bodies."""

    def __init__(self, reply: Reply) -> None:
        self.reply, self.heads, self.bodies = reply, [], []  # type: ignore[var-annotated]
        self.at_once = self.most_at_once = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        length = int(lengths[0]) if lengths else 0
        body = await reader.readexactly(length)
        if head.startswith(b"GET"):
            models = json.dumps({"data": [{"id": "tiny"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(models), models))
        else:
            self.heads.append(head)
            self.bodies.append(json.loads(body))
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            await self.reply(body, writer)
            self.at_once -= 1


@contextmanager
def serving(reply: Reply) -> Iterator[Fake]:
    fake, ready, over = Fake(reply), threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        async with await asyncio.start_server(fake.serve, "127.0.0.1", 0) as server:
            fake.port = server.sockets[0].getsockname()[1]
            ready.set()
            await over.wait()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    ready.wait()
    try:
        yield fake
    finally:
        loops[0].call_soon_threadsafe(over.set)
        thread.join()


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


TEXTS = b"".join(event(choices=[{"text": text}]) for text in ("a", "", "b")) + event(choices=[], usage=USAGE)
CHAT = event(choices=[{"delta": {"role": "assistant"}}]) + event(choices=[{"delta": {"content": "a"}}])
DONE = b"data: [DONE]\n\n"


def pieces(whole: bytes, size: int) -> list[bytes]:
    return [whole[start : start + size] for start in range(0, len(whole), size)]


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


STREAMS: dict[str, tuple[bytes, tuple[str, int, int]]] = {
    "whole": (OK + b"\r\n" + TEXTS + DONE, ("", 3, 3)),
    "in chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(pieces(TEXTS + DONE, 11)), ("", 3, 3)),
    "lines of Windows": (OK + b"\r\n" + (TEXTS + DONE).replace(b"\n", b"\r\n"), ("", 3, 3)),
    "a chat without usage": (OK + b"\r\n" + CHAT + DONE, ("", 1, 1)),
    "broken off": (OK + b"\r\n" + TEXTS, ("the answer broke off", 3, 3)),
    "an error within": (OK + b"\r\n" + TEXTS + event(error={"message": "lost"}) + DONE, ("lost", 3, 3)),
    "no output": (OK + b"\r\n" + event(choices=[]) + DONE, ("an answer without output", 0, 0)),
    "no JSON": (OK + b"\r\ndata: {\n\n" + DONE, ("an event is no JSON", 0, 0)),
    "no choices": (OK + b'\r\ndata: {"choices": [null]}\n\n' + DONE, ("an event is not in the form of OpenAI's", 0, 0)),
    "no usage": (OK + b'\r\ndata: {"usage": [3]}\n\n' + DONE, ("an event is not in the form of OpenAI's", 0, 0)),
    "no object": (OK + b"\r\ndata: [1]\n\n" + DONE, ("an event is no JSON: an object is needed, got [1]", 0, 0)),
    "refused": (
        b'HTTP/1.1 429 Too Many\r\nContent-Length: 30\r\n\r\n{"error": {"message": "full"}}',
        ("HTTP 429: full", 0, 0),
    ),
    "an error page": (b"HTTP/1.1 502 Bad\r\nContent-Length: 3\r\n\r\noh!", ("HTTP 502: oh!", 0, 0)),
    "no HTTP": (b"hello\r\n\r\n", ("no HTTP", 0, 0)),
    "nothing": (b"", ("the connection was closed without an answer", 0, 0)),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("size", [7, 10_000])
def test_an_answer_is_read_in_whatever_pieces_it_comes(name: str, size: int) -> None:
    content, (error, events, tokens) = STREAMS[name]

    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        for part in pieces(content, size):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    with serving(reply) as fake:
        target = Target("127.0.0.1", fake.port, "/v1/completions", None, {})
        (found,) = asyncio.run(send_all(target, [(0.0, 3, b"{}")]))
    assert found.error.startswith(error) if error else found.error == ""
    assert (len(found.stamps), found.output_tokens) == (events, tokens)
    assert found.stamps == sorted(found.stamps)


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_an_event_has_the_time_at_which_its_last_byte_came(newline: bytes) -> None:
    """The end of each event arrives with the next one, whose own end is missing then."""
    whole = (TEXTS + DONE).replace(b"\n", newline)
    first, second, third, _ = whole.split(newline * 2, 3)
    sizes = itertools.accumulate(len(part) for part in (first, newline * 2 + second, newline * 2 + third))
    arrived = [*((size, float(at_s)) for at_s, size in enumerate(sizes)), (len(whole), 9.0)]
    assert [arrived_s for arrived_s, _ in events_of(whole, arrived)] == [1.0, 2.0, 9.0, 9.0]


def test_a_chat_counts_what_brings_tokens() -> None:
    """Also without text; not its beginning with the role, and not an end without text."""
    deltas: list[dict[str, Any]] = [
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {"content": ""}},
        {"delta": {"reasoning_content": "hm"}},
        {"delta": {"tool_calls": [{"index": 0}]}},
        {"delta": {"content": ""}, "finish_reason": "stop"},
        {"delta": {}, "finish_reason": "stop"},
    ]

    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"\r\n" + b"".join(event(choices=[delta]) for delta in deltas) + DONE)
        await writer.drain()

    with serving(reply) as fake:
        target = Target("127.0.0.1", fake.port, "/", None, {})
        (found,) = asyncio.run(send_all(target, [(0.0, 3, b"{}")]))
    assert (found.error, len(found.stamps)) == ("", 3)


@pytest.mark.parametrize(("host", "named"), [("::1", b"Host: [::1]:80\r\n"), ("a.b", b"Host: a.b:80\r\n")])
def test_a_request_names_its_host(host: str, named: bytes) -> None:
    assert named in Target(host, 80, "/", None, {}).request(b"")


def test_a_name_is_looked_up_once_and_goes_on_to_the_address_that_answers() -> None:
    """`localhost` has two addresses, and the server listens on one of them."""
    with serving(tell) as fake:
        target = Target("localhost", fake.port, "/", None, {})
        assert asyncio.run(address_of(target)) == "127.0.0.1"
        found = asyncio.run(send_all(target, [(0.0, 3, b"{}")] * 3))
        assert [one.error for one in found] == [""] * 3
        assert all(b"Host: localhost:" in head for head in fake.heads)
    assert asyncio.run(address_of(target)) == "localhost"
    (lost,) = asyncio.run(send_all(Target("no.such.invalid", 1, "/", None, {}), [(0.0, 1, b"{}")]))
    assert lost.error.startswith("no connection: ")


def test_a_silent_server_ends_in_time_and_one_that_is_not_there_at_once() -> None:
    async def reply(*_: Any) -> None:
        await asyncio.sleep(30)

    with serving(reply) as fake:
        target = Target("127.0.0.1", fake.port, "/", None, {})
        (late,) = asyncio.run(send_all(target, [(0.0, 1, b"{}")], timeout_s=0.2))
    (absent,) = asyncio.run(send_all(target, [(0.0, 1, b"{}")]))
    assert late.error == "no whole answer in 0.2 s"
    assert absent.error.startswith("no connection: ")


@pytest.mark.parametrize("limit", [None, 2])
def test_requests_do_not_wait_for_answers_unless_there_is_a_limit(limit: int | None) -> None:
    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        while limit is None and fake.most_at_once < 6:  # none is answered before all are there
            await asyncio.sleep(0.01)
        writer.write(OK + b"\r\n" + TEXTS + DONE)
        await writer.drain()

    with serving(reply) as fake:
        target = Target("127.0.0.1", fake.port, "/", None, {})
        requests = [(number * 0.01, 3, b"{}") for number in range(6)]
        answers = asyncio.run(send_all(target, requests, most_at_once=limit))
    assert [one.error for one in answers] == [""] * 6
    assert fake.most_at_once == 6 if limit is None else fake.most_at_once <= 2


async def tell(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(OK + b"\r\n" + TEXTS + DONE)
    await writer.drain()


def test_the_program_prints_figures_and_writes_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    records = tmp_path / "records.jsonl"
    words = ["--requests", "3", "--input-tokens", "4", "--output-tokens", "3", "--warmup", "2"]
    words += ["--body", '{"top_p": 0.5}']
    with serving(tell) as fake:
        url = f"127.0.0.1:{fake.port}/v1"
        assert main(["serve", url, *words, "--records", str(records), "--json", "--goodput", "e2el:60000"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["serve", url, *words, "--endpoint", "chat", "--stop-at-eos", "--model", "m"]) == 0
        shown = capsys.readouterr().out
    assert (found["model"], found["requests"], found["output_tokens"]) == ("tiny", 3, 9)
    assert found["goodput"]["share"] == 1.0
    assert "3 of 3 requests answered" in shown
    assert "secret" not in shown
    assert [json.loads(line)["output_tokens"] for line in records.read_text().splitlines()] == [3, 3, 3]
    warm, measured = fake.bodies[:2], fake.bodies[2:5]
    assert not {str(one["prompt"]) for one in warm} & {str(one["prompt"]) for one in measured}
    first, chat = measured[0], fake.bodies[-1]
    assert (len(first.pop("prompt")), first.pop("model"), first.pop("max_tokens")) == (4, "tiny", 3)
    common = {"stream": True, "temperature": 0.0, "stream_options": {"include_usage": True}, "top_p": 0.5}
    assert first == {**common, "ignore_eos": True}
    assert chat.pop("messages")[0]["role"] == "user"
    assert chat == {**common, "model": "m", "max_tokens": 3}
    assert all(b"Authorization: Bearer secret" in head for head in fake.heads)
    assert b"POST /v1/chat/completions " in fake.heads[-1]


def test_records_without_room_lose_no_figures_and_no_earlier_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text("earlier\n")
    with serving(tell) as fake, room_for(50):
        words = ["--requests", "3", "--output-tokens", "3", "--records", str(records), "--json"]
        assert main(["serve", f"127.0.0.1:{fake.port}", *words]) == 68
    out, err = capsys.readouterr()
    assert json.loads(out)["requests"] == 3
    assert err == f"stoker bench serve: --records {records}: File too large\n"
    assert records.read_text() == "earlier\n"


def test_a_server_without_counts_is_told_and_not_taken_for_empty_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    async def reply(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"\r\n" + event(choices=[{"text": "a b c"}]) + DONE)
        await writer.drain()

    words = ["--requests", "2", "--output-tokens", "3"]
    with serving(reply) as fake:
        assert main(["serve", f"127.0.0.1:{fake.port}", *words]) == 0
        shown = capsys.readouterr().out
        assert main(["serve", f"127.0.0.1:{fake.port}", *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    assert "2 output tokens; 2 answers came without the server's counts (usage)" in shown
    assert "input tokens" not in shown
    assert "shorter" not in shown, "an event may have several tokens"
    assert (found["input_tokens"], found["input_tokens_per_s"], found["uncounted"], found["short"]) == (
        None,
        None,
        2,
        0,
    )


def test_a_request_that_fails_is_told_and_the_exit_code_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAMS["refused"][0])
        await writer.drain()

    with serving(refuse) as fake:
        assert main(["serve", f"http://127.0.0.1:{fake.port}", "--requests", "2"]) == 1
    assert "2 failed: HTTP 429: full" in capsys.readouterr().out
    assert main(["serve", f"http://127.0.0.1:{fake.port}", "--requests", "2"]) == 1
    assert f"http://127.0.0.1:{fake.port}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["ftp://x"], "url: http://HOST:PORT is needed"),
        (["x", "--goodput", "speed:3"], "with a name of ttft, tpot, gap, e2el (got 'speed:3')"),
        (["x", "--goodput", "ttft:0"], "got 'ttft:0'"),
        (["x", "--body", "[1]"], "--body: a JSON object is needed (got [1])"),
        (["x", "--endpoint", "chat", "--prompts", "ids"], "--prompts ids needs --endpoint completions"),
        (["x", "--body", "{"], "--body: no JSON"),
        (["x", "--dataset", "/no/such/file"], "No such file"),
        (["x", "--records", "/no/such/folder/file"], "No such file"),
        (["x:99999"], "a port from 1 to 65535 (got x:99999)"),
        (["x", "--trace-speed", "2"], "--trace-speed 2 needs --trace"),
        (["x", "--trace", "a", "--rate", "3"], "--rate 3 is not allowed with --trace"),
        (["x", "--burstiness", "0.5"], "--burstiness 0.5 needs --rate"),
        (["x:0"], "a port from 1 to 65535 (got x:0)"),
    ],
)
def test_wrong_input_is_named(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words, "--model", "m"]) == 64
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--rate", "0"], "a number above 0 is needed (got '0')"),
        (["--burstiness", "inf"], "a number above 0 is needed (got 'inf')"),
        (["--requests", "x"], "a whole number above 0 is needed (got 'x')"),
        (["--input-tokens", "9:3"], "1 <= MIN <= MAX is needed (got '9:3')"),
        (["--vocabulary", "100"], "more than 100 is needed"),
        (["--trace", "a", "--dataset", "b"], "not allowed with"),
    ],
)
def test_a_wrong_option_is_a_usage_error(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "x", *words])
    assert ended.value.code == 64
    assert text in capsys.readouterr().err
