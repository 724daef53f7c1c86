"""Processor time of reading the free room of all nodes after one pod came: what every placement of a gang begins with.

    python -m bench.free_room                   # seconds
    python -m bench.free_room --nodes 100 --pods 400

`devices` of a line: `none` (the API server has no dynamic resource allocation), `unclaimed` (it has, with slices on
every node, and no pod claims any, as in most clusters) or `claimed` (every tenth pod claims one). Each line is JSON
with the mean of a hundred changes.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from stoker.operator.domain.plan import Object
from stoker.operator.loop.capacity_watch import CapacityWatch
from testing.operator.devices import DRIVER, claim, device, device_class, request, resource_slice, template

CHANGES = 100
CLAIMING = 10
"""Of so many pods one claims a device."""
DEVICES = ("none", "unclaimed", "claimed")
READY = [{"type": "Ready", "status": "True"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=4000)
    options = parser.parse_args()
    for devices in DEVICES:
        found = measure(options.nodes, options.pods, devices)
        line = {"bench": "free_room", "devices": devices, "nodes": options.nodes, "pods": options.pods}
        print(json.dumps({**line, "ms": round(found * 1e3, 2)}))


def measure(nodes: int, pods: int, devices: str) -> float:
    """Return processor seconds of one change and one reading."""
    watch = CapacityWatch(lambda: None)
    if devices != "none":
        watch.devices.seen = lambda: True
        watch.devices.put(device_class("gpu", f"device.driver == '{DRIVER}'"))
        watch.devices.put(template("one", request("r", "gpu")))
    for number in range(nodes):
        watch.put(node(number))
        if devices != "none":
            watch.devices.put(resource_slice(name_of(number), [device(f"d{index}") for index in range(8)]))
    for number in range(pods):
        claims = devices == "claimed" and number % CLAIMING == 0
        if claims:
            watch.devices.put(claim(f"c{number}", [(name_of(number % nodes), "d0")], pod=f"p{number}", entry="gpu"))
        watch.put(pod(number, nodes, claims=claims))
    watch.nodes()
    began = time.process_time()
    for number in range(pods, pods + CHANGES):
        watch.put(pod(number, nodes))
        watch.nodes()
    return (time.process_time() - began) / CHANGES


def name_of(number: int) -> str:
    return f"node-{number:05d}"


def node(number: int) -> Object:
    allocatable = {"cpu": "128", "memory": "2Ti", "pods": "110", "nvidia.com/gpu": "8"}
    metadata = {"name": name_of(number), "uid": f"n{number}", "resourceVersion": "1"}
    return {"kind": "Node", "metadata": metadata, "status": {"allocatable": allocatable, "conditions": READY}}


def pod(number: int, nodes: int, *, claims: bool = False) -> Object:
    metadata = {"name": f"p{number}", "namespace": "default", "uid": f"p{number}", "resourceVersion": "1"}
    entries = [{"name": "gpu", "resourceClaimTemplateName": "one"}] if claims else []
    containers: list[Any] = [{"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}]
    spec = {"nodeName": name_of(number % nodes), "containers": containers, "resourceClaims": entries}
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": "Running"}}


if __name__ == "__main__":
    main()
