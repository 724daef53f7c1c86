"""The task of an eval gate: questions, scores, and a run against two engines that ends in a termination message."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from stoker.router.evaluate import evaluate, main, read_questions, score
from testing.router.fake_engine import Exchange, FakeEngine
from testing.router.harness import run

LINES = "\n".join(
    json.dumps(row)
    for row in (
        {"messages": [{"role": "user", "content": "What is 2+2?"}], "expect": "four"},
        {"prompt": "The capital of France is", "expect": "Paris", "max_tokens": 4},
    )
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file has no question"),
        ("{", "line 1: "),
        ('{"prompt": "a"}', "line 1: an object with the text `expect` is needed"),
        ('\n{"expect": "a"}', "line 2: `messages` or `prompt` is needed"),
    ],
)
def test_a_line_that_is_no_question_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_questions(text)


def test_scores_count_what_contains_the_expected_text() -> None:
    questions = read_questions(LINES)
    assert [question.body["max_tokens"] for question in questions] == [64, 4]
    assert score(questions, ["It is  FOUR.", None], ["it is four", " paris "]) == {
        "questions": 2, "score": 0.5, "base_score": 1.0, "differs": 2, "failed": 1, "base_failed": 0,
    }  # fmt: skip


def test_both_engines_are_asked_greedily_with_the_key(tmp_path: Path) -> None:
    asked: list[dict[str, object]] = []

    async def answer(exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        asked.append({**body, "key": exchange.headers.get("authorization")})
        if exchange.engine.pod_uid == "old" and "prompt" in body:
            return await exchange.json({"error": {}}, 500)
        text = "four" if "messages" in body else "Paris"
        return await exchange.json(
            {"choices": [{"message": {"content": text}} if "messages" in body else {"text": text}]}
        )

    async def scenario() -> None:
        new, old = await FakeEngine("new", answer).start(), await FakeEngine("old", answer).start()
        found = await evaluate(read_questions(LINES), "m", new.url, old.url, "secret")
        assert (found["score"], found["base_score"], found["differs"]) == (1.0, 0.5, 1)
        assert (found["failed"], found["base_failed"]) == (0, 1)
        assert {(body["model"], body["temperature"], body["key"]) for body in asked} == {("m", 0, "Bearer secret")}
        asked.clear()
        await evaluate(read_questions(LINES), "m", new.url, old.url, "secret", "former")
        assert [body["model"] for body in asked] == ["m", "m", "former", "former"]
        asked.clear()
        await evaluate(read_questions(LINES), "m", new.url, old.url, "secret", old_key="other")
        assert [body["key"] for body in asked] == ["Bearer secret"] * 2 + ["Bearer other"] * 2
        prompts, log = tmp_path / "prompts.jsonl", tmp_path / "log"
        prompts.write_text(LINES)
        arguments = ["--prompts", str(prompts), "--model", "m", "--termination-log", str(log)]
        code = await asyncio.to_thread(main, [*arguments, "--new", new.url, "--old", new.url])
        assert (code, json.loads(log.read_text())["result"]["score"]) == (0, 1.0)
        asked.clear()
        for name, text in {"new": "one two", "old": "three"}.items():
            (tmp_path / name).write_text(text)
        keys = ["--api-keys", str(tmp_path / "new"), "--old-api-keys", str(tmp_path / "old")]
        await asyncio.to_thread(main, [*arguments, *keys, "--new", new.url, "--old", old.url])
        assert {body["key"] for body in asked} == {"Bearer one", "Bearer three"}
        (tmp_path / "old").write_text("")
        assert await asyncio.to_thread(main, [*arguments, *keys, "--new", new.url, "--old", old.url]) != 0
        assert json.loads(log.read_text())["detail"] == f"{tmp_path / 'old'} has no API key"
        prompts.write_text("{}")
        assert await asyncio.to_thread(main, [*arguments, "--new", new.url, "--old", new.url]) != 0
        word = json.loads(log.read_text())
        assert (word["cause"], word["detail"].partition(" ")[0]) == ("TaskFailed", f"{prompts}:")
        new.kill()
        old.kill()

    run(scenario)
