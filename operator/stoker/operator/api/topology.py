"""How close the pods of a gang stand to each other: of a job's attempt, of a replica of engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.operator.api.value import LabelKey, Value


class Topology(Value):
    """One level of closeness."""

    key: LabelKey
    """Node label whose value the pods of one unit share: `nvidia.com/gpu.clique`."""
    mode: Literal["Preferred", "Required"] = "Preferred"


Levels = Annotated[tuple[Topology, ...], Field(max_length=3, json_schema_extra={"x-kubernetes-list-type": "atomic"})]
