"""Processor time of one placement: a gang of 500 pods on 1,000 nodes, against one reading of those nodes.

The reading asks every node how many pods of the gang fit, without any choice: what no placement can do without.

    python -m bench.placement                   # seconds
    python -m bench.placement --nodes 200 --replicas 10

Each line is JSON; `ratio` is placement over reading, both the least of several runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Literal

from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.node_capacity import HOSTNAME, NodeCapacity
from stoker.operator.domain.placement.place import Placement, place

GPU = "nvidia.com/gpu"
REPEATS = 7
KEYS = ("example.com/clique", "example.com/rack", "topology.kubernetes.io/zone")
MODES: dict[str, tuple[Literal["Required", "Preferred"], ...]] = {
    "no levels": (),
    "preferred": ("Preferred",) * 3,
    "required": ("Required", "Required", "Preferred"),
    "refused": ("Required",) * 3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=50, help="model replicas of ten pods each (default: 50)")
    options = parser.parse_args()
    nodes = [capacity(index) for index in range(options.nodes)]
    gang = Gang(requests={GPU: 8, "cpu": 32_000}, parts=2, stages=5, replicas=options.replicas)
    reading = least(lambda: [node.slots(gang) for node in nodes if node.obstacle(gang) is None])
    for name, modes in MODES.items():
        levels = [Level(key, mode) for key, mode in zip(KEYS, modes, strict=False)]
        placed = isinstance(place(gang, nodes, levels), Placement)
        spent = least(lambda levels=levels: place(gang, nodes, levels))  # type: ignore[misc]
        line = {"bench": "placement", "levels": name, "nodes": options.nodes, "pods": gang.size, "placed": placed}
        print(json.dumps({**line, "ms": round(spent * 1e3, 1), "ratio": round(spent / reading, 1)}))


def capacity(index: int) -> NodeCapacity:
    """An empty node of eight GPUs: 8 nodes to a clique, 32 to a rack, 256 to a zone."""
    name = f"node-{index:05d}"
    labels = {HOSTNAME: name, **{key: str(index // size) for key, size in zip(KEYS, (8, 32, 256), strict=True)}}
    free = {GPU: 8, "cpu": 128_000, "memory": 2**41, "pods": 110}
    return NodeCapacity(name=name, free=free, labels=labels)


def least(work: Callable[[], object]) -> float:
    """Return the least processor seconds of several runs."""
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


if __name__ == "__main__":
    main()
