"""A network partition between two pods on different nodes: their packets vanish, all others pass."""

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import permutations

from e2e.cluster.node import Node


@contextmanager
def partition(nodes: Iterable[Node], one: str, other: str) -> Iterator[None]:
    """Drop every packet between two pod addresses, also of open connections, in the nodes' own network namespaces."""
    pids = [node.pid for node in nodes if node.alive]
    try:
        _change("--insert", pids, one, other)
        yield
    finally:
        _change("--delete", pids, one, other)


def _change(verb: str, pids: Iterable[int], one: str, other: str) -> None:
    for pid in pids:
        for source, target in permutations((one, other)):
            rule = ["FORWARD", "--source", source, "--destination", target, "--jump", "DROP"]
            inside = ["nsenter", f"--target={pid}", "--net", "iptables", "--wait", verb, *rule]
            subprocess.run(inside, check=True, capture_output=True, text=True, timeout=120)
