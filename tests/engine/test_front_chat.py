"""`stoker chat` against a server."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

import httpx
import pytest

from stoker.cli.chat import ChatConversation, ChatError, main
from testing.engine.fake_core import ByteCodec
from testing.engine.serving import Serving, run, serving


def test_one_question_gets_one_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            arguments = [
                s.url + "/v1",
                "--once",
                "say:Paris",
                "--temperature",
                "0",
                "--model",
                "tiny",
                "--system",
                "be brief",
            ]
            assert await asyncio.to_thread(main, arguments) == 0
            assert capsys.readouterr().out == "Paris\n"
            request = s.core.requests[0]
            assert bytes(request.prompt_tokens) == b"<system>be brief<user>say:Paris<assistant>"
            assert request.params.temperature == 0

    run(scenario)


def test_a_conversation_remembers_and_forgets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            monkeypatch.setattr(sys, "stdin", io.StringIO("say:one\nfail say:abcdef\nsay:two\n/new\nsay:three\n"))
            assert await asyncio.to_thread(main, [s.url]) == 0
            out = capsys.readouterr().out
            assert "one" in out
            assert "not finite" in out
            assert f"tiny at {s.url}" in out.replace("\n", "")
            prompts = [bytes(request.prompt_tokens).decode() for request in s.core.requests]
            assert prompts[2] == "<user>say:one<assistant>one<user>say:two<assistant>"  # the failed answer is left out
            assert prompts[3] == "<user>say:three<assistant>"

    run(scenario)


class ThinkingCodec(ByteCodec):
    template_source: str | None = "<think>"


def test_reasoning_is_shown_before_an_answer_and_is_no_part_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, ThinkingCodec) as s:
            question = "say:<think>why</think>yes"
            monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\nsay:b\n"))
            assert await asyncio.to_thread(main, [s.url]) == 0
            assert "why\n\nyes" in capsys.readouterr().out
            assert bytes(s.core.requests[-1].prompt_tokens).endswith(b"<assistant>yes<user>say:b<assistant>")
            assert await asyncio.to_thread(main, [s.url, "--once", question]) == 0
            assert capsys.readouterr().out == "yes\n", "programs read the answer alone"

    run(scenario)


@pytest.mark.parametrize(("host", "is_hinted"), [("chat", True), ("127.0.0.1", False), ("chat.example", False)])
def test_the_name_of_a_deployment_gets_the_way_to_it(host: str, is_hinted: bool) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("unknown", request=request)

    with httpx.Client(base_url=f"http://{host}:8000", transport=httpx.MockTransport(refuse)) as http:
        conversation = ChatConversation(http)
        for ask in (conversation.find_model, lambda: [*conversation.ask("hi")]):
            with pytest.raises(ChatError, match="unknown") as refused:
                ask()
            assert ("kubectl port-forward service/chat 8000" in str(refused.value)) is is_hinted


HI = 'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'


@pytest.mark.parametrize(
    ("events", "said"),
    [
        pytest.param('data: {"error": "lost"}\n\n', "lost", id="an error that is a text"),
        pytest.param('data: {"error": {"code": 3}}\n\n', "{'code': 3}", id="an error without a message"),
        pytest.param("data: [1]\n\n", "an event of the stream is no JSON object: [1]", id="no object"),
        pytest.param("data: {oops\n\n", "an event of the stream is no JSON object: {oops", id="no JSON"),
        pytest.param(f'data: {{"id": "x"}}\n\n{HI}data: [DONE]\n\n', None, id="an event without choices"),
        pytest.param(f'data: {{"choices": [{{"delta": null}}]}}\n\n{HI}data: [DONE]\n\n', None, id="no delta"),
    ],
)
def test_streams_of_other_servers_are_read_or_refused_with_the_reason(events: str, said: str | None) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=events))
    with httpx.Client(base_url="http://server", transport=transport) as http:
        conversation = ChatConversation(http)
        if said is None:
            assert list(conversation.ask("x")) == ["hi"]
            return
        with pytest.raises(ChatError) as refused:
            list(conversation.ask("x"))
        assert str(refused.value) == said


@pytest.mark.parametrize(("status", "shown"), [("ready", "two"), ("unloaded", "one")])
def test_the_model_that_is_shown_is_one_that_is_loaded(status: str, shown: str) -> None:
    cards = {"data": [{"id": "one", "status": "unloaded"}, {"id": "two", "status": status}]}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=cards))
    with httpx.Client(base_url="http://server", transport=transport) as http:
        assert ChatConversation(http).find_model() == shown


def test_what_goes_wrong_is_said_with_a_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def ask(s: Serving, *arguments: str) -> tuple[int, str]:
        code = await asyncio.to_thread(main, [s.url, "--once", "say:x", *arguments])
        return code, capsys.readouterr().err

    async def scenario() -> None:
        async with serving(tmp_path) as s:
            code, message = await ask(s, "--model", "big")
            assert (code, "does not exist" in message) == (74, True)
            assert (await ask(s, "--api-key-file", str(tmp_path / "none")))[0] == 64
        assert main([s.url, "--once", "say:x"]) == 74
        assert main([s.url]) == 74  # before the first question
        capsys.readouterr()
        for url in ("ftp://x", "http://127.0.0.1:99999", "http://"):
            assert main([url, "--once", "say:x"]) == 64
            assert capsys.readouterr().err.startswith("stoker chat: url: http://HOST:PORT is needed")
        (tmp_path / "keys").write_text("one\ntwo\n")
        assert main([s.url, "--once", "say:x", "--api-key-file", str(tmp_path / "keys")]) == 64
        assert "keys: one API key of plain letters is needed, on one line" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main([s.url, "--timeout-s", "-1"])
        assert "a number of seconds above 0 and below 1,000,000 is needed (got -1)" in capsys.readouterr().err

    run(scenario)
