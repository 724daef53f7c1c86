"""Conversion of a pydantic model to the structural schema that Kubernetes accepts in a CRD. Pure.

Pydantic writes `$ref`, `anyOf [X, null]`, `const`, `title` and `additionalProperties: false`. A structural schema has
each type in place, once, without nulls. Defaults of objects become `{}`, so that the defaults of their members apply.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from stoker.operator.api.value import DESCRIBED_ELSEWHERE, Value, wire_name

Schema = dict[str, Any]

_DROPPED = ("title", "propertyNames", "$defs", "$ref", "anyOf", "allOf", "const")
_INT64_MAX = 2**63 - 1


class NotStructural(ValueError):
    """A model has no structural schema; the message names the path."""


def structural_schema(model: type[BaseModel]) -> Schema:
    """Return the structural schema of one model with all members in place.

    Raises:
        NotStructural: a union that is neither optional nor int-or-string, or a tuple of mixed items.
    """
    found = model.model_json_schema(by_alias=True, mode="validation")
    return _Rewriter(found.get("$defs", {}), _field_docs()).rewrite(found, model.__name__, model.__name__)


class _Rewriter:
    """Rewrites the tree of one model with its definitions and the docstrings of the fields."""

    def __init__(self, definitions: dict[str, Schema], docs: dict[tuple[str, str], str]) -> None:
        self.definitions = definitions
        self.docs = docs
        self.explained: dict[str, str] = {}

    def rewrite(self, node: Schema, owner: str, path: str) -> Schema:
        """Rewrite one node; `owner` is the class whose properties it has, `path` serves messages."""
        node, owner = self._resolved(node, owner, path)
        found = {key: value for key, value in node.items() if key not in _DROPPED}
        if "const" in node:
            found["enum"] = [node["const"]]
        if found.get("type") == "object":
            self._object(found, owner, path)
        if "prefixItems" in found:
            raise NotStructural(f"{path}: a tuple of mixed items has no structural schema")
        if "items" in found:
            found["items"] = _plain_item(self.rewrite(found["items"], owner, f"{path}[]"))
        if found.get("type") == "integer" and found.get("maximum") == _INT64_MAX:
            del found["maximum"]
        _fit_default(found)
        return _with_keys_alone(found) if found.pop(DESCRIBED_ELSEWHERE, False) else found

    def _resolved(self, node: Schema, owner: str, path: str) -> tuple[Schema, str]:
        """Put the target in the place of a reference or union; keys beside it win."""
        beside = {key: value for key, value in node.items() if key not in ("$ref", "anyOf", "allOf")}
        if "$ref" in node:
            name = node["$ref"].rsplit("/", 1)[-1]
            target, owner = self._resolved(self.definitions[name], name, path)
            return _merged(target, beside), owner
        if "anyOf" in node:
            branches = [branch for branch in node["anyOf"] if branch.get("type") != "null"]
            if len(branches) == 1:
                target, owner = self._resolved(branches[0], owner, path)
                return _merged(target, beside), owner
            if [branch.get("type") for branch in branches] == ["integer", "string"]:
                return _merged(_int_or_string(*branches), beside), owner
            raise NotStructural(f"{path}: a union of {len(branches)} types has no structural schema")
        if "allOf" in node:
            raise NotStructural(f"{path}: allOf has no place in a structural schema")
        return node, owner

    def _told(self, owner: str, path: str) -> bool:
        """Whether the class has its explanation at another path."""
        return self.explained.setdefault(owner, path) != path

    def _object(self, found: Schema, owner: str, path: str) -> None:
        """Rewrite the properties, in their written order, explained where the class first appears."""
        if found.get("description") == self.definitions.get(owner, {}).get("description") and self._told(owner, path):
            found.pop("description", None)
        if found.get("additionalProperties") in (True, False):
            del found["additionalProperties"]
        elif "additionalProperties" in found:
            found["additionalProperties"] = _plain_item(self.rewrite(found["additionalProperties"], owner, f"{path}.*"))
        if "properties" not in found:
            return
        explains = not self._told(owner, path)
        members = {}
        for name, member in found["properties"].items():
            text = self.docs.get((owner, name)) if explains else None
            documented = {**member, "description": text} if text else member
            members[name] = self.rewrite(documented, owner, f"{path}.{name}")
        found["properties"] = members


def _merged(target: Schema, beside: Schema) -> Schema:
    """Merge two schemas: validations of both apply, every other key of `beside` wins."""
    found = {**target, **beside}
    rules = "x-kubernetes-validations"
    if rules in target and rules in beside:
        found[rules] = [*target[rules], *beside[rules]]
    if beside.get("default", 0) is None:
        del found["default"]
    return found


def _int_or_string(number: Schema, text: Schema) -> Schema:
    """Return int-or-string, the one union of structural schemas, with the limits of number and text."""
    found = {"x-kubernetes-int-or-string": True, **number, **text}
    if found.get("maximum") == _INT64_MAX:
        del found["maximum"]
    del found["type"]
    return found


def _plain_item(schema: Schema) -> Schema:
    """Drop the item's description, which the list has already."""
    return {key: value for key, value in schema.items() if key != "description"}


def _with_keys_alone(found: Schema) -> Schema:
    """Return an object, or a list of objects, whose members the schema preserves and does not describe."""
    inner = found.get("items", found)
    keys = found.get("x-kubernetes-list-map-keys", [])
    short: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    if keys:
        short |= {"properties": {key: inner["properties"][key] for key in keys}, "required": keys}
    beside = {key: value for key, value in found.items() if key not in ("properties", "required", "items")}
    return {**beside, "items": short} if "items" in found else {**beside, **short}


def _fit_default(found: Schema) -> None:
    """Set an object's default where a member has one, and drop that of an empty list."""
    default = found.get("default")
    if isinstance(default, dict):
        inner = any("default" in member for member in found.get("properties", {}).values())
        found["default"] = default = _filled(found) if inner else None
    if default is None or default in ([], ()):
        found.pop("default", None)


def _filled(schema: Schema) -> dict[str, Any]:
    """The defaults of the members that the object's rules name, and of inner objects with rules.

    The API server runs an object's rules on its default before the members' defaults are in it.
    """
    rules = " ".join(rule["rule"] for rule in schema.get("x-kubernetes-validations", ()))
    return {
        name: member["default"] or _filled(member) if member.get("type") == "object" else member["default"]
        for name, member in schema.get("properties", {}).items()
        if "default" in member and (re.search(rf"\bself\.{name}\b", rules) or _has_rules(member))
    }


def _has_rules(schema: Schema) -> bool:
    members = schema.get("properties", {}).values()
    return "x-kubernetes-validations" in schema or any(_has_rules(member) for member in members)


def without_fallbacks(schema: Schema) -> Schema:
    """Drop the fixed text of rules that show their numbers; it serves the reference page."""
    found = dict(schema)
    if "x-kubernetes-validations" in found:
        found["x-kubernetes-validations"] = [
            {key: value for key, value in one.items() if key != "message" or "messageExpression" not in one}
            for one in found["x-kubernetes-validations"]
        ]
    return _each_inner(found, without_fallbacks)


_UNCHECKED_IN_A_STATUS = (
    "default", "format", "required", "minimum", "maximum", "pattern", "minLength", "maxLength",
    "x-kubernetes-validations",
)  # fmt: skip


def status_schema(schema: Schema) -> Schema:
    """Reduce a schema to that of a status: types, list keys, enumerations and numbers of items.

    One operator writes it and shortens its texts; lengths of texts are there to price CEL rules, and a status has none.
    It has one owner as a whole: else the API server finds the owner of each of its hundreds of fields with each write.
    """
    return {**_status_part(schema), "x-kubernetes-map-type": "atomic"}


def _status_part(schema: Schema) -> Schema:
    found = {key: value for key, value in schema.items() if key not in _UNCHECKED_IN_A_STATUS}
    found = _each_inner(found, _status_part)
    if keys := found.get("x-kubernetes-list-map-keys"):
        found["items"] = {**found["items"], "required": keys}
    return found


def _each_inner(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Apply `change` to the schema's properties, items and values."""
    if "properties" in schema:
        schema["properties"] = {name: change(member) for name, member in schema["properties"].items()}
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            schema[inner] = change(schema[inner])
    return schema


def _field_docs() -> dict[tuple[str, str], str]:
    """Map (class, wire name) to the docstring below the field, for every section and its base classes."""
    found: dict[tuple[str, str], str] = {}
    for cls in _sections(Value):
        for parent in reversed(cls.__mro__):
            if issubclass(parent, Value):
                written = _documented_fields(parent.__module__).get(parent.__name__, {})
                found |= {(cls.__name__, name): text for name, text in written.items()}
    return found


def _sections(cls: type[Value]) -> Iterator[type[Value]]:
    for child in cls.__subclasses__():
        yield child
        yield from _sections(child)


@functools.cache
def _documented_fields(module: str) -> Mapping[str, Mapping[str, str]]:
    """Map class and wire name to the docstrings below the fields, read from the module's source."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: dict(_documented(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _documented(body: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            yield wire_name(field.target.id), inspect.cleandoc(str(text.value.value))
