"""Memory of the view of nodes: bytes for each node and each pod that the operator keeps to place gangs.

Nodes and pods are as a cluster lists them, with the labels, images and managed fields that the operator drops, and are
read in pages as its informers read them. A child process measures, so that nothing else of the bench counts.

    python -m bench.cluster.view_memory                 # a few seconds
    python -m bench.cluster.view_memory --nodes 100 --pods 1000

The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
from pathlib import Path
from typing import Any

from stoker.operator.domain.plan import Object
from stoker.operator.loop.capacity_watch import CapacityWatch

PAGE = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=10_000)
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps(pool.apply(measure, (options.nodes, options.pods))))


def measure(nodes: int, pods: int) -> dict[str, Any]:
    """Return the growth of this process in MiB, and bytes by node and by pod."""
    watch = CapacityWatch(lambda: None)
    fill(watch, [("Node", 1), ("Pod", 1)], nodes)  # code and tables that the first object needs
    empty = resident_bytes()
    fill(watch, [("Node", nodes)], nodes)
    with_nodes = resident_bytes()
    fill(watch, [("Pod", pods)], nodes)
    whole = resident_bytes()
    assert len(watch.nodes()) == nodes
    return {
        "bench": "view_memory",
        "nodes": nodes,
        "pods": pods,
        "mib": round((whole - empty) / 2**20, 1),
        "bytes_per_node": round((with_nodes - empty) / nodes),
        "bytes_per_pod": round((whole - with_nodes) / pods),
    }


def fill(watch: CapacityWatch, kinds: list[tuple[str, int]], nodes: int) -> None:
    """Put objects page by page: each page is parsed, reduced, and gone before the next."""
    for kind, count in kinds:
        for first in range(0, count, PAGE):
            page = range(first, min(first + PAGE, count))
            texts = [json.dumps(node(number) if kind == "Node" else pod(number, nodes)) for number in page]
            for reduced in [watch.pruned(json.loads(text)) for text in texts]:
                watch.put(reduced)


def resident_bytes() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def node(number: int) -> Object:
    name = f"node-{number:05}"
    body = identity("Node", name, number)
    body["metadata"]["labels"] = {
        "kubernetes.io/hostname": name,
        "topology.kubernetes.io/zone": f"z{number % 3}",
        "rack": f"r{number // 16}",
        **{f"feature.node.kubernetes.io/cpu-cpuid.{flag}": "true" for flag in range(60)},
    }
    amounts = {"cpu": "192", "memory": "2113432Ki", "nvidia.com/gpu": "8", "ephemeral-storage": "1Ti", "pods": "110"}
    status = {
        "allocatable": amounts,
        "capacity": amounts,
        "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}],
        "images": [{"names": [f"example.com/image:{image}"], "sizeBytes": 10**9} for image in range(50)],
    }
    return {**body, "spec": {}, "status": status}


def pod(number: int, nodes: int) -> Object:
    requests = {"cpu": "12", "memory": "100Gi", "nvidia.com/gpu": "1"}
    container = {
        "name": "main",
        "image": "example.com/image:1",
        "resources": {"requests": requests, "limits": requests},
        "env": [{"name": f"VARIABLE_{index}", "value": "x" * 40} for index in range(20)],
    }
    spec = {"nodeName": f"node-{number % nodes:05}", "containers": [container]}
    status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    return {**identity("Pod", f"pod-{number:06}", number), "spec": spec, "status": status}


def identity(kind: str, name: str, number: int) -> Object:
    managed = [{"manager": "kubelet", "fieldsV1": {f"f:{field}": {} for field in range(40)}}]
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": f"00000000-0000-4000-8000-{kind[0].encode().hex():>02}{number:010}",
        "resourceVersion": str(number + 1),
        "managedFields": managed,
    }
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata}


if __name__ == "__main__":
    main()
