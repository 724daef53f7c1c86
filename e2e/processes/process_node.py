"""A node for an API server alone: the pods of one namespace run as processes of this machine.

The embedded cluster's kubelet does the work, with a mirror of the real API server's objects as its store. Pods run the
sources of a chosen folder, as pods of an older release keep their image.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from e2e.api.access import read_kubeconfig
from e2e.api.api_client import ApiClient
from e2e.processes.mirror import MirroredObjects
from stoker.operator.cluster.local.addresses import Addresses
from stoker.operator.cluster.local.folders import short_folders
from stoker.operator.cluster.local.gpus import Gpus
from stoker.operator.cluster.local.node import Node
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.cluster.local.pod_environment import node_environment
from stoker.operator.cluster.local.probes import ask_http
from stoker.operator.cluster.local.process import ShimRunner
from stoker.operator.cluster.local.reservations import Reservations
from stoker.operator.domain.clock import SystemClock
from stoker.operator.service.local.kubelet import Kubelet

SOURCES = ("model", "trainer", "engine", "operator")
NAMES = Path(__file__).parent / "names"
"""A folder whose `sitecustomize` resolves the names of pods in the processes of pods: there is no DNS server here."""


def python_path(checkout: Path) -> str:
    """Return `PYTHONPATH` for the programs of a checkout."""
    return os.pathsep.join(str(checkout / name) for name in SOURCES)


@contextlib.contextmanager
def process_node(kubeconfig: Path, namespace: str, folder: Path, checkout: Path) -> Iterator[Path]:
    """Run the namespace's pods with the sources of `checkout`; yield the folder of their logs."""
    started, stop = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(_live(kubeconfig, namespace, folder, checkout, started, stop))
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's thread
            failures.append(error)
            started.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    try:
        if not failures:
            yield folder / "logs" / namespace
    finally:
        stop.set()
        thread.join()
        if failures:
            raise failures[0]


async def _live(
    kubeconfig: Path, namespace: str, folder: Path, checkout: Path, started: threading.Event, stop: threading.Event
) -> None:
    with short_folders(folder) as folders, Reservations() as reservations:
        folders.make()
        inherited = {
            **node_environment(dict(os.environ)),
            "PYTHONPATH": f"{NAMES}{os.pathsep}{python_path(checkout)}",
            "STOKER_TEST_ADDRESSES": str(folders.addresses),
            "OMP_NUM_THREADS": "1",
        }
        async with ApiClient(read_kubeconfig(kubeconfig)) as api, MirroredObjects(api, namespace) as objects:
            node = Node(
                objects=cast(ObjectStore, objects),
                runner=ShimRunner(),
                ask=ask_http,
                addresses=Addresses("loopback", reservations.take, folders.addresses),
                folders=folders,
                clock=SystemClock(),
                gpus=Gpus(()),
                environment=inherited,
                python=sys.executable,
            )
            kubelet = Kubelet(node)
            kubelet.start()
            started.set()
            await asyncio.to_thread(stop.wait)
            await kubelet.stop(1.0)
