"""The scalars of the API and the base of every object in it: what a field of a manifest may look like.

Wire names are camelCase, Python names snake_case. There are no floats: rates are decimal strings, so that a manifest
survives every YAML and JSON library unchanged. Lengths are limited everywhere, because the API server prices CEL rules
by them.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


def wire_name(name: str) -> str:
    """Return a field's name on the wire: `activation_budget_gib` is `activationBudgetGiB`."""
    return to_camel(name).replace("Gib", "GiB")


class Value(BaseModel):
    """Base of every section. Reading ignores unknown fields: the writer may be newer than this operator."""

    model_config = ConfigDict(
        alias_generator=wire_name, validate_by_name=True, validate_by_alias=True, frozen=True, extra="ignore"
    )

    def to_wire(self) -> dict[str, Any]:
        """Return plain JSON data with wire names, without absent members."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


Int32 = Annotated[int, Field(ge=0, le=2**63 - 1)]
Int64 = Annotated[int, Field(ge=0, le=2**63 - 1)]
Count = Annotated[int, Field(ge=1, le=2**63 - 1)]
"""A number of things, at least one."""

Seconds = Annotated[int, Field(ge=1, le=2**31 - 1)]
Percent = Annotated[int, Field(ge=0, le=100)]
Port = Annotated[int, Field(ge=1, le=65535)]

Text = Annotated[str, Field(max_length=1024)]
ForeignName = Annotated[str, Field(max_length=253)]
"""Name in another system: a metric, a bucket."""

Label = Annotated[str, Field(max_length=63, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]
"""A DNS label: becomes part of pod and Service names."""

Name = Annotated[str, Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""Name of a Kubernetes object in the same namespace."""

QueueName = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""Name of a queue: an object's, that is also the value of a label."""

LabelKey = Annotated[
    str,
    Field(max_length=317, pattern=r"^([-a-z0-9.]+/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?$"),
]
"""Name of a label: `rack`, `topology.kubernetes.io/zone`."""

Uid = Annotated[str, Field(min_length=1, max_length=64)]
Time = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
"""RFC 3339, UTC, as Kubernetes writes it."""

Path = Annotated[str, Field(min_length=1, max_length=1024)]
"""A path as the pod sees it."""

RelativePath = Annotated[
    str,
    Field(
        max_length=512,
        pattern=r"^[\w=+,@-][\w.=+,@-]*(/[\w=+,@-][\w.=+,@-]*)*$",
    ),
]
"""A folder inside a volume: no leading slash, no part that starts with a dot."""

Folder = Annotated[str, Field(max_length=128, pattern=r"^[\w-][\w.-]*$")]
"""A plain folder name, for instance `step-00001200.0a1b2c3d`."""

Digest = Annotated[str, Field(max_length=128, pattern=r"^[a-z0-9]+(:[0-9a-f]+)?$")]
Quantity = (
    Annotated[int, Field(ge=0, le=2**63 - 1)]
    | Annotated[str, Field(max_length=32, pattern=r"^\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?$")]
)
"""A Kubernetes resource quantity: 2, "500m", "16Gi"."""

IntOrPercent = (
    Annotated[int, Field(ge=0, le=10000)] | Annotated[str, Field(max_length=4, pattern=r"^(100|[1-9]?[0-9])%$")]
)
"""A number of replicas, or a part of them: 1, "25%"."""

_NUMBER = r"\d+(\.\d+)?([eE][-+]?\d\d?)?"
Decimal = Annotated[str, Field(max_length=24, pattern=f"^{_NUMBER}$")]
"""A number >= 0 as text: "3e-4", "0.1"."""

Fraction = Annotated[str, Field(max_length=24, pattern=r"^(0(\.\d+)?|1(\.0+)?)$")]
"""A number from 0 to 1 as text: "0.05"."""

BelowOne = Annotated[str, Field(max_length=24, pattern=r"^0(\.\d+)?$")]
"""A number from 0 up to, but not with, 1 as text."""

Weight = Annotated[int, Field(ge=1, le=2**31 - 1)] | Annotated[str, Field(max_length=24, pattern=f"^{_NUMBER}$")]
"""A share relative to its neighbours: 3, "0.7"."""

Measured = Annotated[str, Field(max_length=32)]
"""A measured number as text; may be "nan" or "inf"."""

Opaque = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
"""Object whose members the schema does not check."""

StringMap = Annotated[
    dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=1024)]], Field(max_length=64)
]


def measured(value: float | None) -> str | None:
    """Format a float for a status: six significant digits, so that noise in the last bits rewrites no object."""
    if value is None:
        return None
    return f"{value:.6g}" if math.isfinite(value) else str(value)


def comparable(text: str | None) -> float | None:
    """Return the number of a measured value; None for a missing one, and for `nan` and `inf`, which are no results."""
    value = math.nan if text is None else float(text)
    return value if math.isfinite(value) else None


def rule(
    expression: str,
    message: str,
    *,
    shown: str = "",
    names: dict[str, str] | None = None,
    field: str = "",
    reason: str = "",
) -> dict[str, Any]:
    """Return one CEL validation.

    Args:
        expression: true for what is allowed; checked only on updates where it names `oldSelf`.
        message: fixed text.
        shown: text with CEL in braces that shows the numbers: "min {self.min} is above max {self.max}".
        names: short names for parts of `expression` and `shown`; later ones may use earlier ones.
        field: path below the object that the message is about, for instance ".parallelism".
        reason: default `FieldValueInvalid`.
    """
    names = names or {}
    found: dict[str, Any] = {"rule": _let(names, expression, "all"), "message": message}
    if shown:
        found["messageExpression"] = _let(names, _formatted(shown))
    if field:
        found["fieldPath"] = field
    if reason:
        found["reason"] = reason
    return found


def first_of(*cases: tuple[str, str], message: str, names: dict[str, str], field: str) -> dict[str, Any]:
    """Return one CEL validation for several cases, which shows the text of the first that fails.

    Args:
        cases: (expression, text with CEL in braces).
    """
    conditions = [f"({case})" if "||" in case else case for case, _ in cases]
    shown = _formatted(cases[-1][1])
    for condition, (_, text) in list(zip(conditions, cases, strict=True))[-2::-1]:
        shown = f"{condition} ? ({shown}) : {_formatted(text)}"
    return {
        "rule": _let(names, " && ".join(conditions), "all"),
        "message": message,
        "messageExpression": _let(names, shown),
        "fieldPath": field,
    }


def _formatted(template: str) -> str:
    """Return CEL that fills in the template.

    It uses `format`, because the API server cannot bound the cost of `'a' + string(b) + 'c'`.
    """
    parts = re.split(r"\{([^{}]*)\}", template)
    return f"'{'%s'.join(parts[::2])}'.format([{', '.join(parts[1::2])}])"


def _let(names: dict[str, str], body: str, macro: str = "map") -> str:
    """Bind names in CEL, which has no variables, by going over lists of one (`all` where the body is a condition)."""
    for name, expression in reversed(names.items()):
        body = f"[{expression}].{macro}({name}, {body}){'[0]' if macro == 'map' else ''}"
    return body


def rules(*found: dict[str, Any]) -> dict[str, Any]:
    """`json_schema_extra` of a section or field that has CEL validations."""
    return {"x-kubernetes-validations": list(found)}


Positive = Annotated[
    str,
    Field(
        max_length=24,
        pattern=f"^{_NUMBER}$",
        json_schema_extra=rules(rule("double(self) > 0.0", "must be above 0")),
    ),
]
"""A number above 0 as text."""


def exactly_one(*fields: str) -> dict[str, Any]:
    """Return the rule that one of these optional members must be given."""
    given = [f"has(self.{_escaped(field)})" for field in fields]
    text = f"exactly one of {', '.join(fields[:-1])} and {fields[-1]} is needed"
    return rule(" != ".join(given) if len(given) == 2 else f"[{', '.join(given)}].exists_one(x, x)", text)


def forbidden(expression: str, message: str, field: str = "") -> dict[str, Any]:
    """Return a rule about a change or a name that is never allowed."""
    return rule(expression, message, field=field, reason="FieldValueForbidden")


def immutable(message: str) -> dict[str, Any]:
    """`json_schema_extra` of a required or defaulted field that is fixed once the object exists."""
    return rules(forbidden("self == oldSelf", message))


def _escaped(field: str) -> str:
    """Write a property name as CEL in Kubernetes needs it: reserved words between double underscores."""
    return f"__{field}__" if field in {"import", "namespace", "package"} else field


def described_elsewhere() -> dict[str, Any]:
    """Return `json_schema_extra` of a status field whose members another field explains."""
    return {DESCRIBED_ELSEWHERE: True}


DESCRIBED_ELSEWHERE = "x-described-elsewhere"


def list_map(*keys: str) -> dict[str, Any]:
    """Return `json_schema_extra` of a list with `keys`, which server-side apply merges item by item."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}
