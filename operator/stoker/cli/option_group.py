"""Options that several commands share, given to the command as one value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def option_group(name: str, form: type[Any], options: Sequence[Decorator]) -> Decorator:
    """Return the decorator that adds `options` and calls the command with their values as one `name: form`.

    `form` is a dataclass; each option's parameter is one of its fields. A field without an option keeps its default.
    """
    fields = [field.name for field in dataclasses.fields(form)]

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def called(**values: Any) -> Any:
            own = {field: values.pop(field) for field in fields if field in values}
            return command(**values, **{name: form(**own)})

        grouped: Callable[..., Any] = called
        for option in reversed(options):
            grouped = option(grouped)
        return grouped

    return add
