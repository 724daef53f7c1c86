"""The program of a render process: reads one template, then conversations, and answers each with a text or a reason.

It runs foreign code (a Jinja template) in Jinja's immutable sandbox: no file, no import and no attribute with an
underscore is reachable. The kernel limits CPU time and memory, so nothing that a template computes needs its own check.

Started and limited by `render_process`; no module imports it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stoker.model.render_frames import (
    ANSWER,
    DONE,
    MAX_REASON_CHARACTERS,
    MAX_TEXT_CHARACTERS,
    MEMORY_BYTES,
    OUT_OF_MEMORY,
    QUESTION,
    REFUSED,
    decode_text,
    encode_text,
)


def main() -> None:
    """Answer questions until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    limit_resources()
    for shutdown in (signal.SIGINT, signal.SIGTERM):  # the program may still drain; this process ends with its pipe
        signal.signal(shutdown, signal.SIG_IGN)
    template: jinja2.Template | None = None
    try:
        for question in read_questions(sys.stdin.buffer):
            kind, text = DONE, ""
            try:
                if template is None:
                    template = compile_template(decode_text(question))
                else:
                    text = render(template, json.loads(question))
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001  any failure of a template is its answer
                kind, text = REFUSED, (str(error) or type(error).__name__)[:MAX_REASON_CHARACTERS]
            send(answers, kind, encode_text(text))
            stop_clock()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def read_questions(pipe: BinaryIO) -> Iterator[bytes]:
    """Yield each question, with the clock of its CPU limit running."""
    while len(head := pipe.read(QUESTION.size)) == QUESTION.size:
        limit_s, length = QUESTION.unpack(head)
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF ends the process, also inside of C code
        yield pipe.read(length)


def stop_clock() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)


def send(pipe: Any, kind: bytes, text: bytes) -> None:
    rest = memoryview(ANSWER.pack(kind, len(text)) + text)
    while rest:
        rest = rest[pipe.write(rest) :]


def limit_resources() -> None:
    """Allow no file to grow, no core dump, and MEMORY_BYTES beyond what the interpreter has mapped already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + MEMORY_BYTES
    for kind, limit in ((resource.RLIMIT_AS, size), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))


def compile_template(source: str) -> jinja2.Template:
    """Compile with the settings of Hugging Face's chat templates. Constants are computed when rendering, not here."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        cache_size=0,
        extensions=["jinja2.ext.loopcontrols", GenerationTag],
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(source)


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Return the text, or raise what the template raises, or ValueError for a text that is too long."""
    pieces, length = [], 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > MAX_TEXT_CHARACTERS:
            raise ValueError(f"a text of more than {MAX_TEXT_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part in some templates; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(value: Any, indent: int | None = None, **settings: Any) -> str:
    """Return JSON as Hugging Face's templates expect it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **settings)


def raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def strftime_now(form: object) -> str:
    return datetime.now().strftime(str(form))


if __name__ == "__main__":
    main()
