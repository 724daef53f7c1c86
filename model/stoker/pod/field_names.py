"""Names of fields as a manifest writes them, from the names of a program's configuration.

Messages of ranks are read beside a manifest: they speak of `memory.zeroStage`, not of `memory.zero_stage`. No torch and
nothing of ours is imported here.
"""

from __future__ import annotations

ELSEWHERE = {"gang.nodes": "workers.replicas", "gang.ranks_per_node": "workers.ranksPerPod"}
"""Fields of a configuration that the manifest has in another section."""


def manifest_name(path: str) -> str:
    """Return a field's path as the custom resource has it: `memory.zero_stage` is `memory.zeroStage`."""
    return ".".join(map(_camel, ELSEWHERE.get(path, path).split(".")))


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join("GiB" if part == "gib" else part[:1].upper() + part[1:] for part in others)
