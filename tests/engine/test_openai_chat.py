"""`/v1/chat/completions` on the wire, and the official client against it."""

from __future__ import annotations

import asyncio
from collections.abc import Sized
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from stoker.engine.http.openai.protocol import ChatMessage
from stoker.engine.http.prompts import render_chat
from testing.engine.fake_core import MAX_MODEL_LEN, ByteCodec
from testing.engine.serving import run, serving, until

PATH = "/v1/chat/completions"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_a_whole_answer_has_openais_shape(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body = (await s.post(PATH, messages=user("say:hey"))).json()
            assert body["id"].startswith("chatcmpl-")
            assert (body["object"], body["model"]) == ("chat.completion", "tiny")
            assert body["choices"] == [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "hey", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                }
            ]
            request = s.core.requests[0]
            prompt = b"<user>say:hey<assistant>"
            assert bytes(request.prompt_tokens) == prompt  # the template writes special tokens, the tokenizer none
            assert request.params.max_tokens == MAX_MODEL_LEN - len(prompt)  # without a limit: what fits

    run(scenario)


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            chunks = await s.stream(PATH, messages=user("say:hi"), n=2)
            for index, expected in ((0, "hi"), (1, "1hi")):
                mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
                assert mine[0]["delta"] == {"role": "assistant", "content": ""}
                assert "".join(c["delta"].get("content", "") for c in mine) == expected
                assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
            assert chunks[-1] == "[DONE]"

    run(scenario)


def test_content_may_be_parts_of_text(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            parts = [{"type": "text", "text": "say:a"}, {"type": "refusal", "refusal": "b"}]
            body = (await s.post(PATH, messages=user(parts), max_completion_tokens=3)).json()
            assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("a\nb", "length")
            answer = await s.post(PATH, messages=user([{"type": "refusal", "text": "x"}]))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages.content.refusal")
            answer = await s.post(PATH, messages=user([{"type": "image_url", "image_url": {"url": "x"}}]))
            assert (answer.status_code, answer.json()["error"]["message"]) == (
                400,
                'not supported yet: messages.content.image_url; allowed: "text"',
            )

    run(scenario)


def test_an_answer_may_go_on_with_the_last_message(tmp_path: Path) -> None:
    class Codec(ByteCodec):
        def render_chat(self, messages: Any, **settings: Any) -> str:
            return (
                super().render_chat([{**one, "content": one["content"].rstrip("~")} for one in messages], **settings)
                + "</s>"
            )

    async def scenario() -> None:
        async with serving(tmp_path, Codec) as s:
            own = {"continue_final_message": True, "add_generation_prompt": False}
            for content, kept in (("say:a", "say:a"), ("say:a ", "say:a "), (" say:a ~", None)):
                messages = [*user("a"), {"role": "assistant", "content": content}]
                answer = await s.post(PATH, messages=messages, **own)
                tokens = await s.post("/tokenize", messages=messages, **own)
                if kept is None:
                    for refused in (answer, tokens):
                        assert (refused.status_code, refused.json()["error"]["param"]) == (
                            400,
                            "continue_final_message",
                        )
                    continue
                prompt = f"<user>a<assistant>{kept}".encode()
                assert bytes(s.core.requests[-1].prompt_tokens) == bytes(tokens.json()["tokens"]) == prompt
                assert answer.json()["choices"][0]["message"]["content"] == kept.removeprefix("say:")
            for wrong in ({"continue_final_message": True}, {**own, "add_generation_prompt": True}):
                refused = await s.post(PATH, messages=user("say:a"), **wrong)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")
            refused = await s.post(PATH, messages=user(""), **own)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")

    run(scenario)


@pytest.mark.parametrize("content", ["<", "|", "end", "a<", "in a<b"])
def test_an_answer_goes_on_behind_a_content_that_the_end_of_a_message_holds_too(content: str) -> None:
    class Codec(ByteCodec):
        def render_chat(self, messages: Any, **settings: Any) -> str:
            return "".join(f"<|{one['role']}|>{one['content']}<|im_end|>\n" for one in messages)

    messages = [ChatMessage(role="user", content="hi"), ChatMessage(role="assistant", content=content)]
    text = render_chat(Codec(Path()), messages, False, None, {}, continues=True)
    assert text == f"<|user|>hi<|im_end|>\n<|assistant|>{content}"


@pytest.mark.parametrize(("template", "role"), [(None, "system"), ("{{ developer }}", "developer")])
def test_a_developers_message_is_the_systems_where_the_template_knows_none(
    tmp_path: Path, template: str | None, role: str
) -> None:
    class Codec(ByteCodec):
        template_source: str | None = template

    async def scenario() -> None:
        async with serving(tmp_path, Codec) as s:
            messages = [{"role": "developer", "content": "x"}, *user("say:hi")]
            assert (await s.post(PATH, messages=messages)).status_code == 200
            assert bytes(s.core.requests[-1].prompt_tokens).startswith(f"<{role}>x".encode())

    run(scenario)


def test_logprobs_carry_bytes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            body = (await s.post(PATH, messages=user("say:é"), logprobs=True, top_logprobs=2, max_tokens=1)).json()
            assert body["choices"][0]["logprobs"]["content"] == [
                {
                    "token": "bytes:\\xc3",
                    "logprob": -1.95,
                    "bytes": [0xC3],
                    "top_logprobs": [
                        {"token": "bytes:\\xc3", "logprob": -1.95, "bytes": [0xC3]},
                        {"token": "bytes:\\xc4", "logprob": -1.96, "bytes": [0xC4]},
                    ],
                }
            ]
            chunks = await s.stream(PATH, messages=user("say:ab"), logprobs=True)
            names = [
                entry["token"]
                for c in chunks[:-1]
                for entry in (c["choices"][0]["logprobs"] or {"content": []})["content"]
            ]
            assert names == ["a", "b"]

    run(scenario)


def test_the_official_client_works_unmodified(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, api_keys=("secret",)) as s:
            await asyncio.to_thread(_sync_client, s.url)
            async with openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="secret", max_retries=0) as client:
                await _async_client(client)
            async with openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="wrong", max_retries=0) as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            given = {key: (await s.http.get("/v1/models", headers={"X-Api-Key": key})).status_code for key in KEYS}
            assert given == {"secret": 200, "wrong": 401, "": 401}

    run(scenario)


KEYS = ("secret", "wrong", "")
"""Keys in the header that passes through an API server's proxy."""


def _sync_client(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny", "other-name"]
        assert client.models.retrieve("tiny").id == "tiny"
        chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "say:hello"}])
        assert chat.choices[0].message.content == "hello"
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 2
        text = client.completions.create(model="tiny", prompt="say:abc", logprobs=1, max_tokens=2)
        assert text.choices[0].text == "ab"
        assert text.choices[0].logprobs is not None
        assert text.choices[0].logprobs.tokens == ["a", "b"]
        with client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "say:hello"}],
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 6
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="tiny", prompt="x" * 300)
        assert bad.value.code == "context_length_exceeded"
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt="refuse")


async def _async_client(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="tiny", prompt="say:xyz", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "xyz"
    chat = await client.chat.completions.create(
        model="tiny", messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "say:q"}],
        logprobs=True, top_logprobs=1, n=2, extra_body={"top_k": 3},
    )  # fmt: skip
    assert [choice.message.content for choice in chat.choices] == ["q", "1q"]
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert chat.choices[0].logprobs.content[0].bytes == [ord("q")]
    failing = await client.completions.create(model="tiny", prompt="fail say:abcdef", stream=True)
    with pytest.raises(openai.APIError, match="not finite"):
        _ = [chunk async for chunk in failing]


def more_than(found: Sized, number: int) -> bool:
    return len(found) > number


def test_a_client_that_leaves_aborts_its_request_in_every_state(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            bodies: tuple[dict[str, Any], ...] = (
                {"messages": user("hang say:x"), "stream": True},  # nothing has come yet
                {"messages": user("hang say:x")},
                {"messages": user("held say:" + "x" * 80)},  # in the middle, nothing sent
            )
            for body in bodies:
                aborted = len(s.core.aborted)
                request = asyncio.ensure_future(s.post(PATH, **body))
                await until(lambda: len(s.core.running) == 1)
                request.cancel()
                await until(partial(more_than, s.core.aborted, aborted))
            assert len(s.core.aborted) == 3
            async with s.http.stream(
                "POST", PATH, json={"messages": user("held say:" + "x" * 80), "stream": True}
            ) as answer:
                await anext(answer.aiter_lines())
            await until(lambda: len(s.core.aborted) == 4)
            several = asyncio.ensure_future(s.post("/v1/completions", prompt=["hang", "hang", "say:x"]))
            await until(lambda: len(s.core.requests) == 7 and s.front.core.running == len(s.core.running) == 2)
            several.cancel()
            await until(lambda: len(s.core.aborted) == 6)
            await until(lambda: s.app.running == 0)
            assert (s.core.running, s.front.core.running) == (set(), 0)

    run(scenario)
