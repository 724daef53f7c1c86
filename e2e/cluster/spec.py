"""The parts of a cluster as data: its nodes with their capacities and labels."""

import re
from dataclasses import dataclass, field
from typing import Any

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
GPU = "nvidia.com/gpu"


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One node."""

    name: str
    """The node's name, which is its host name in the cluster too."""

    gpus: int = 0
    """Number of `nvidia.com/gpu` that it advertises; there are no devices behind them."""

    labels: dict[str, str] = field(default_factory=dict)
    """Labels of its Node object, for example `topology.kubernetes.io/zone`."""

    cpu: float | None = None
    """Cores that pods may request; None: all of the machine's. Never more than the machine has."""

    memory_gib: float | None = None
    """Memory that pods may request; None: all of the machine's."""

    resources: dict[str, int] = field(default_factory=dict)
    """Further extended resources by name, for example `{"example.com/fpga": 2}`."""

    taints: tuple[str, ...] = ()
    """Taints in kubectl's form, `key=value:NoSchedule`."""

    def __post_init__(self) -> None:
        check_name("nodes[].name", self.name)
        if self.gpus < 0:
            raise ValueError(f"nodes[{self.name}].gpus is {self.gpus}, it must be 0 or more")

    @property
    def extended_resources(self) -> dict[str, str]:
        """Return the resources that its Node object advertises beyond those that the kubelet detects."""
        gpus = {GPU: self.gpus} if self.gpus else {}
        return {name: str(count) for name, count in {**gpus, **self.resources}.items()}


def check_name(path: str, name: str) -> None:
    """Refuse a name that is no valid host name, folder and cgroup at once."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{path} is {name!r}, it must be 1 to 32 lower-case letters, digits and dashes")


def default_nodes(count: int = 2) -> tuple[NodeSpec, ...]:
    """Return nodes with eight GPUs each, one rack for every two of them."""
    zone = "topology.kubernetes.io/zone"
    rack = "topology.stoker.dev/rack"
    return tuple(
        NodeSpec(name=f"node-{chr(ord('a') + i)}", gpus=8, labels={zone: "here", rack: f"rack-{i // 2}"})
        for i in range(count)
    )


def parse_nodes(document: Any) -> tuple[NodeSpec, ...]:
    """Return the nodes of a list of mappings with the fields of `NodeSpec` (the `nodes` of `--config`).

    Unknown keys are refused.
    """
    if not isinstance(document, list) or not document:
        raise ValueError("nodes must be a list with at least one node")
    known = NodeSpec.__dataclass_fields__
    for i, entry in enumerate(document):
        if not isinstance(entry, dict) or "name" not in entry:
            raise ValueError(f"nodes[{i}] must be a mapping with a name")
        if unknown := sorted(set(entry) - set(known)):
            raise ValueError(f"nodes[{i}]: unknown {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(NodeSpec(**{**entry, "taints": tuple(entry.get("taints", ()))}) for entry in document)
