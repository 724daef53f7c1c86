"""The CEL rules of a structural schema, compiled once and run over objects as the API server does.

The library is Google's C++ implementation with its Python binding (`cel_expr_python`). It evaluates transition rules,
`has`, quantifiers and text functions as Kubernetes does, in about 30 microseconds a rule; the pure Python one (`celpy`)
needs milliseconds.

Called by `admission`, after the structure was checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_strings

from stoker.operator.admission.status_cause import StatusCause, status_cause
from stoker.operator.admission.structure import item_key

Schema = Mapping[str, Any]

_ESCAPED = re.compile(r"\.__([a-z]+)__")
"""Kubernetes writes reserved words as `self.__import__`; the library takes them as they are."""


class RuleError(ValueError):
    """A rule of a CRD does not compile; the message names the place."""


def _environment() -> Any:
    return cel.NewEnv(variables={"self": cel.Type.DYN, "oldSelf": cel.Type.DYN}, extensions=[ext_strings.ExtStrings()])


@dataclass(frozen=True)
class _Rule:
    """One validation, compiled."""

    program: Any
    message: str
    shown: Any | None
    field: str
    reason: str
    transition: bool

    def check(self, path: str, data: Mapping[str, Any]) -> StatusCause | None:
        """Return the cause, or None where the rule holds; a rule that cannot be evaluated does not hold."""
        outcome = self.program.eval(data=data).value()
        if outcome is True:
            return None
        detail = self._detail(data) if outcome is False else f"rule cannot be evaluated: {outcome}"
        where = f"{path}{self.field}".removeprefix(".")
        return status_cause(where, self.reason, self._value(data["self"]), detail)

    def _value(self, value: Any) -> str:
        """Return the value as the API server writes it: that of a scalar, where the reason is not that it is there."""
        scalar = isinstance(value, str | bool | int | float)
        return json.dumps(value) if scalar and self.reason == "FieldValueInvalid" else ""

    def _detail(self, data: Mapping[str, Any]) -> str:
        text = self.shown.eval(data=data).value() if self.shown is not None else None
        return text if isinstance(text, str) and text else self.message


class Rules:
    """The rules of one node of the schema and of all nodes below it."""

    def __init__(self, schema: Schema, path: str = "", environment: Any = None) -> None:
        environment = environment or _environment()
        self._schema = schema
        self._own = [_compiled(found, path, environment) for found in schema.get("x-kubernetes-validations", ())]
        members = {
            name: Rules(member, f"{path}.{name}", environment) for name, member in schema.get("properties", {}).items()
        }
        self._members = {name: rules for name, rules in members.items() if not rules.empty}
        self._inner = _inner_rules(schema, path, environment)

    @property
    def empty(self) -> bool:
        return not (self._own or self._members or self._inner)

    def causes(self, value: Any, old: Any, path: str = "") -> Iterator[StatusCause]:
        """Yield a cause for each rule that does not hold; what an update leaves as it was stays valid, as on the API
        server, so that a rule that came later does not refuse the status of a stored object.

        Args:
            value: the new value, with defaults.
            old: the value that stood here before; None where there was none.
        """
        if old is not None and value == old:
            return
        data = {"self": value} if old is None else {"self": value, "oldSelf": old}
        for rule in self._own:
            if not rule.transition or old is not None:
                found = rule.check(path, data)
                if found is not None:
                    yield found
        yield from self._below(value, old, path)

    def _below(self, value: Any, old: Any, path: str) -> Iterator[StatusCause]:
        if isinstance(value, dict):
            before = old if isinstance(old, dict) else {}
            for name, rules in self._members.items():
                if name in value:
                    yield from rules.causes(value[name], before.get(name), f"{path}.{name}" if path else name)
            if self._inner is not None:
                for name in value.keys() - self._members.keys():
                    yield from self._inner.causes(value[name], before.get(name), f"{path}[{name}]")
        elif isinstance(value, list) and self._inner is not None:
            earlier = self._by_key(old)
            for index, item in enumerate(value):
                yield from self._inner.causes(item, earlier.get(item_key(item, self._schema)), f"{path}[{index}]")

    def _by_key(self, old: Any) -> dict[str | None, Any]:
        """Map keys to the items that stood here before; items of an atomic list have no key."""
        items = old if isinstance(old, list) else []
        found = {item_key(item, self._schema): item for item in items}
        return {key: item for key, item in found.items() if key is not None}


def _inner_rules(schema: Schema, path: str, environment: Any) -> Rules | None:
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), Mapping):
            rules = Rules(schema[inner], f"{path}[]", environment)
            return None if rules.empty else rules
    return None


def _compiled(found: Mapping[str, Any], path: str, environment: Any) -> _Rule:
    expression, shown = found["rule"], found.get("messageExpression")
    return _Rule(
        program=_program(expression, path, environment),
        message=found.get("message", f"failed rule: {expression}"),
        shown=_program(shown, path, environment) if shown else None,
        field=found.get("fieldPath", ""),
        reason=found.get("reason", "FieldValueInvalid"),
        transition=re.search(r"\boldSelf\b", expression) is not None,
    )


def _program(expression: str, path: str, environment: Any) -> Any:
    try:
        return environment.compile(_ESCAPED.sub(r".\1", expression))
    except RuntimeError as error:
        raise RuleError(f"{path}: {expression}: {error}") from error
