"""A bench on a real API server with fake nodes: its start, its operator, its end."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.cluster.fake_nodes import FakeNodes, OperatorProcess, enter_pod_network
from bench.cluster.objects import NAMESPACE, agents, claim


class KubeBench(ABC):
    """Measurements, one after the other on one control plane."""

    api_server_flags: tuple[str, ...] = ()

    def __init__(self, options: argparse.Namespace, folder: Path, nodes: int) -> None:
        self.options = options
        self.folder = folder
        self.num_nodes = nodes

    async def run(self) -> dict[str, Any]:
        """Start the control plane with a claim for checkpoints, measure, and stop it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        async with agents(), FakeNodes(self.folder, self.num_nodes, self.api_server_flags) as self.nodes:
            self.api = self.nodes.api
            for body in claim("checkpoints"):
                await self.api.create(body)
            return await self.measure()

    @abstractmethod
    async def measure(self) -> dict[str, Any]:
        """Return the figures; the control plane runs."""

    @contextmanager
    def operator_process(self, port: int, *, profile: str | None = None, **settings: Any) -> Iterator[OperatorProcess]:
        """Run an operator that listens on this port, with further settings of its configuration."""
        config = {
            "namespace": NAMESPACE,
            "api": {"kubeconfig": str(self.nodes.plane.kubeconfig)},
            "listen": {"host": "127.0.0.1", "port": port},
            "log_level": "warning",
            **settings,
        }
        file = self.folder / "operator.json"
        file.write_text(json.dumps(config))
        operator = OperatorProcess(file, self.folder, profile)
        try:
            yield operator
        finally:
            operator.stop()


def run_bench(bench: type[KubeBench], options: argparse.Namespace, nodes: int, keep: str | None) -> None:
    """Run in a network of its own and print the figures as JSON; logs go to `keep` or are thrown away."""
    enter_pod_network()
    with tempfile.TemporaryDirectory(prefix="kube-bench-") as folder:
        figures = asyncio.run(bench(options, Path(keep or folder), nodes).run())
    print(json.dumps(figures))


def say(text: str) -> None:
    print(text, flush=True)
