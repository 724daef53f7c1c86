"""Ask two revisions of a model known questions, and report their scores: the task of a canary's eval gate.

python -m stoker.router.evaluate --prompts questions.jsonl --model NAME --new http://HOST:PORT --old http://HOST:PORT

Each line of the file is `{"messages": [...], "expect": "text"}` or `{"prompt": "...", "expect": "text"}`, with
`"max_tokens"` if 64 are not enough. Answers are greedy. One is right when it contains the expected text, whatever the
case and the white space. The result is the termination message: `{questions, score, base_score, differs, failed,
base_failed}`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.command_line import CommandParser, run_program
from stoker.pod.termination_message import TerminationMessage
from stoker.router.connection import BackendError, Connection, Outgoing

log = logging.getLogger("stoker.router.evaluate")
MAX_TOKENS = 64
CONNECT_S = 5.0
ANSWER_S = 300.0
AT_ONCE = 4
"""Questions that an engine has at the same time, so that its clients notice little."""


@dataclass(frozen=True)
class Question:
    """One line of the file: where it goes, its body without the model, and what the answer must contain."""

    target: bytes
    body: dict[str, Any]
    expect: str


def read_questions(text: str) -> tuple[Question, ...]:
    """Parse the lines.

    Raises:
        ValueError: names the line and the field.
    """
    found = tuple(_question(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())
    if not found:
        raise ValueError("the file has no question")
    return found


def _question(number: int, line: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("expect"), str):
        raise ValueError(f"line {number}: an object with the text `expect` is needed")
    body = {"max_tokens": row.get("max_tokens", MAX_TOKENS), "temperature": 0}
    if isinstance(row.get("messages"), list):
        return Question(b"/v1/chat/completions", {**body, "messages": row["messages"]}, row["expect"])
    if isinstance(row.get("prompt"), str):
        return Question(b"/v1/completions", {**body, "prompt": row["prompt"]}, row["expect"])
    raise ValueError(f"line {number}: `messages` or `prompt` is needed")


def score(questions: Sequence[Question], new: Sequence[str | None], old: Sequence[str | None]) -> dict[str, Any]:
    """Count the right answers of both, and the answers that differ. None: no answer came."""
    number = len(questions)
    return {
        "questions": number,
        "score": sum(map(_is_right, questions, new)) / number,
        "base_score": sum(map(_is_right, questions, old)) / number,
        "differs": sum(mine != base for mine, base in zip(new, old, strict=True)),
        "failed": sum(answer is None for answer in new),
        "base_failed": sum(answer is None for answer in old),
    }


def _is_right(question: Question, answer: str | None) -> bool:
    return answer is not None and _plain(question.expect) in _plain(answer)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


async def ask_all(url: str, questions: Sequence[Question], model: str, key: str | None) -> list[str | None]:
    """Ask one engine every question; return the texts of its answers, None for one that failed."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def ask(question: Question) -> str | None:
        async with slots:
            return await _ask(url, question, model, key)

    return await asyncio.gather(*map(ask, questions))


async def _ask(url: str, question: Question, model: str, key: str | None) -> str | None:
    parts = urlsplit(url)
    headers = [(b"content-type", b"application/json")]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    request = Outgoing("POST", question.target, headers, json.dumps({**question.body, "model": model}).encode())
    try:
        connection = await Connection.open((parts.hostname or "", parts.port or 80), CONNECT_S)
        try:
            head, body = await connection.small_exchange(request, ANSWER_S)
        finally:
            connection.close()
        if head.status != 200:
            raise BackendError(f"{head.status}: {body[:300]!r}")
        (choice,) = json.loads(body)["choices"]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    except (BackendError, ValueError, KeyError, TypeError) as error:
        log.warning("%s: no answer: %s", url, error)
        return None


async def evaluate(
    questions: Sequence[Question],
    model: str,
    new: str,
    old: str,
    key: str | None,
    old_model: str | None = None,
    old_key: str | None = None,
) -> dict[str, Any]:
    """Ask both engines, one after the other.

    Args:
        old_model: the name of the model at the old one, if it has another.
        old_key: the API key of the old one, if it has another.
    """
    answers = await ask_all(new, questions, model, key)
    return score(questions, answers, await ask_all(old, questions, old_model or model, old_key or key))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the task, and return an exit code of docs/exit-codes.md."""
    parser = CommandParser(
        prog="python -m stoker.router.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", required=True, metavar="FILE", help="the questions, one JSON object a line")
    parser.add_argument("--model", required=True, help="the name that both serve the model by")
    parser.add_argument("--old-model", metavar="MODEL", help="the old one's name for it, if it is another")
    parser.add_argument("--new", required=True, metavar="URL", help="an engine of the new revision")
    parser.add_argument("--old", required=True, metavar="URL", help="an engine of the old revision")
    parser.add_argument("--api-keys", metavar="FILE", help="API keys, one a line; the first is used")
    parser.add_argument("--old-api-keys", metavar="FILE", help="those of the old engine, if it has others")
    parser.add_argument("--termination-log", metavar="FILE")
    found = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        questions = _questions(found.prompts)
        key, old_key = _first_key(found.api_keys), _first_key(found.old_api_keys)
        result = asyncio.run(evaluate(questions, found.model, found.new, found.old, key, found.old_model, old_key))
        word = TerminationMessage(cause=Cause.COMPLETED, result=result)
    except (OSError, ValueError) as error:
        word = TerminationMessage(cause=Cause.TASK_FAILED, detail=str(error))
    log.info("%s", json.dumps(word.result) if word.result else word.detail)
    if found.termination_log:
        word.write(found.termination_log)
    return EXIT_CODES[word.cause]


def _questions(file: str) -> tuple[Question, ...]:
    try:
        return read_questions(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _first_key(file: str | None) -> str | None:
    """The first key of a file.

    Raises:
        ValueError: the file has none, or is no UTF-8.
    """
    if not file:
        return None
    try:
        keys = Path(file).read_text(encoding="utf-8").split()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: {error}") from error
    if not keys:
        raise ValueError(f"{file} has no API key")
    return keys[0]


if __name__ == "__main__":
    run_program(main, "python -m stoker.router.evaluate")
