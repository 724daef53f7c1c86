"""Chat templates: Jinja text that came with the weights, so foreign input. Rendered in the immutable sandbox with limits on size and time.

No file, no import, no attribute with an underscore is reachable; every loop step, call and operation is metered.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARACTERS = 256 * 1024
MAX_TEXT_CHARACTERS = 8 * 2**20
"""Of the rendered prompt, and of any text on the way."""
TIME_LIMIT_S = 5.0
METERED = "stoker_metered"
CONCATENATED = "stoker_concatenated"
GROWING_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "translate", "zfill"})
"""Methods of str that make a text as long as their argument says: no template needs them."""
GROWING_FILTERS = ("center", "indent", "wordwrap", "format", "xmlattr", "urlize", "pprint")


class ChatTemplateError(ValueError):
    """The template is damaged, does not take these messages, or exceeds a limit."""


Message = Mapping[str, object]


class ChatTemplate:
    """One compiled template. Threads may share it."""

    def __init__(
        self, source: str, variables: Mapping[str, object] | None = None, *, time_limit_s: float = TIME_LIMIT_S
    ) -> None:
        """`variables`: what the template sees beside the messages, such as bos_token. Raises ChatTemplateError where the source is no template."""
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(
                f"chat template: {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are allowed"
            )
        self.source, self.variables, self.time_limit_s = source, dict(variables or {}), time_limit_s
        Sandbox(time_limit_s).compile_metered(source)  # an error shows now, not at the first request

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        **settings: object,
    ) -> str:
        """The text of a conversation. Raises ChatTemplateError where the template refuses it (its own words) or a limit is reached."""
        sandbox = Sandbox(self.time_limit_s)
        context = {
            **self.variables,
            **settings,
            "messages": list(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return sandbox.collect(sandbox.compile_metered(self.source).generate(context))
        except ChatTemplateError:
            raise
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            raise ChatTemplateError(f"chat template: {error or type(error).__name__}") from error


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one rendering: it holds that rendering's clock."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, time_limit_s: float) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag], cache_size=0
        )
        self.time_limit_s, self.deadline = time_limit_s, time.monotonic() + time_limit_s
        self.filters |= {METERED: self.metered, CONCATENATED: self.concatenated, "tojson": to_json}
        self.filters |= {name: self.refuse_filter(name) for name in GROWING_FILTERS if name != "indent"}
        self.filters["replace"] = lambda text, old, new, count=None: self.call_replace(
            str(text), (old, new) if count is None else (old, new, count)
        )
        self.filters["indent"] = self.indent
        self.filters["join"] = self.join_filter
        self.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(str(form)),
        }

    def compile_metered(self, source: str) -> jinja2.Template:
        """Compile after every loop and every `~` was wrapped, so that no construct runs or grows unmetered."""
        try:
            tree = self.parse(source)
            for loop in tree.find_all(nodes.For):
                loop.iter = wrap(METERED, loop.iter)
            for join in tree.find_all(nodes.Concat):
                join.nodes = [wrap(CONCATENATED, nodes.List(list(join.nodes), lineno=join.lineno))]
            return jinja2.Template.from_code(self, self.compile(tree), self.globals)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ChatTemplateError(f"chat template: {error or type(error).__name__}") from error

    def collect(self, chunks: Iterator[str]) -> str:
        pieces, length = [], 0
        for chunk in chunks:
            self.check_time()
            length += len(chunk)
            check_length(length)
            pieces.append(chunk)
        return "".join(pieces)

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise ChatTemplateError(f"chat template: took longer than {self.time_limit_s} s")

    def metered(self, iterable: Any) -> Any:
        return MeteredIterable(iterable, self.check_time)

    def concatenated(self, values: list[Any]) -> str:
        texts = [str(value) for value in values]
        check_length(sum(len(text) for text in texts))
        return "".join(texts)

    def call(self, context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        """Every call of a template comes through here."""
        self.check_time()
        method = getattr(function, "__wrapped__", function)  # jinja2 wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name in GROWING_METHODS:
                raise ChatTemplateError(f"chat template: the method {name} of texts is not allowed")
            if name == "replace":
                return self.call_replace(owner, arguments)
            if name == "join":
                return self.join(owner, arguments[0])
            if name in ("format", "format_map"):
                check_widths(owner)
        return super().call(context, function, *arguments, **named)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Operators that make something large from something small."""
        self.check_time()
        if operator == "*" and (isinstance(left, str | list | tuple) or isinstance(right, str | list | tuple)):
            sequence, times = (left, right) if isinstance(left, str | list | tuple) else (right, left)
            check_length(len(sequence) * int(times))
        elif operator in ("**", "*") and max(abs(left), abs(right)) > 2**64:
            raise ChatTemplateError("chat template: numbers grow too large")
        elif operator == "**" and abs(right) > 64:
            raise ChatTemplateError(f"chat template: the exponent {right} is too large")
        elif operator == "%" and isinstance(left, str):
            check_widths(left)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str | list | tuple):
            check_length(len(result))
        return result

    def call_replace(self, text: str, arguments: Sequence[Any]) -> str:
        old, new = str(arguments[0]), str(arguments[1])
        count = text.count(old) if len(arguments) < 3 or int(arguments[2]) < 0 else int(arguments[2])
        check_length(len(text) + min(count, len(text) + 1) * len(new))
        return text.replace(old, new, count)

    def join(self, separator: str, values: Any) -> str:
        texts = [str(value) for value in self.metered(values)]
        check_length(sum(len(text) + len(separator) for text in texts))
        return separator.join(texts)

    def join_filter(self, values: Any, d: str = "", attribute: str | int | None = None) -> str:
        return self.join(
            d, values if attribute is None else [self.getitem(value, attribute) for value in self.metered(values)]
        )

    def indent(self, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        prefix = width if isinstance(width, str) else " " * min(int(width), 1000)
        check_length(len(text) + (text.count("\n") + 1) * len(prefix))
        lines = str(text).split("\n")
        return "\n".join(
            prefix + line if (number or first) and (line or blank) else line for number, line in enumerate(lines)
        )

    def refuse_filter(self, name: str) -> Callable[..., NoReturn]:
        def refuse(*_: object, **__: object) -> NoReturn:
            raise ChatTemplateError(f"chat template: the filter {name} is not allowed")

        return refuse


class MeteredIterable:
    """Loops look at the clock at each step."""

    def __init__(self, iterable: Any, check_time: Callable[[], None]) -> None:
        self.iterable, self.check_time = iterable, check_time

    def __len__(self) -> int:
        return len(self.iterable)

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable:
            self.check_time()
            yield item


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part in some templates; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def wrap(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(cast("nodes.Expr", node), name, [], [], None, None, lineno=node.lineno)


def check_length(length: int) -> None:
    if length > MAX_TEXT_CHARACTERS:
        raise ChatTemplateError(
            f"chat template: a text of {length} characters; at most {MAX_TEXT_CHARACTERS} are allowed"
        )


def check_widths(form: str) -> None:
    """`%9999999d` and `{:>9999999}` are as long as they say."""
    if re.search(r"\d{4}|\*", form):
        raise ChatTemplateError(
            "chat template: a format with a width of 1000 or more, or a variable one, is not allowed"
        )


def to_json(value: Any, indent: int | None = None, **settings: Any) -> str:
    """As Hugging Face's templates expect it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=None if indent is None else min(int(indent), 16), **settings)


def raise_exception(message: object) -> NoReturn:
    raise ChatTemplateError(f"chat template: {message}")
