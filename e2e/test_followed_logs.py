"""`stoker logs -f` on a real node: neither a restarted API server nor a killed kubelet loses or doubles a line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from e2e.cluster.cluster import Cluster
from e2e.cluster.image import BUSYBOX
from e2e.cluster.spec import default_nodes
from e2e.cluster.waiting import wait_until

pytestmark = pytest.mark.timeout(400)

LINES = "i=0; while [ ! -e end ]; do i=$((i+1)); echo line $i; [ $((i%10)) = 0 ] && echo same; sleep 0.02; done"
"""Counts, with lines that are alike, until it is told to end."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster("logs", default_nodes(1)) as running:
        yield running


def restart_api_server(cluster: Cluster) -> None:
    cluster.plane.restart_api_server()


def kill_kubelet(cluster: Cluster) -> None:
    """The node starts it again."""
    next(iter(cluster.nodes.values())).kill_kubelet()


@pytest.mark.parametrize("disturb", [restart_api_server, kill_kubelet])
def test_a_followed_log_is_whole(cluster: Cluster, tmp_path: Path, disturb: Callable[[Cluster], None]) -> None:
    name = disturb.__name__.replace("_", "-")
    start_pod(cluster, name)
    whole, tail = (
        Followed(cluster, name, tmp_path / one, options) for one, options in (("a", []), ("b", ["--tail=3"]))
    )
    try:
        tail.wait_for_more()
        for _ in range(2):
            whole.wait_for_more()
            disturb(cluster)
        whole.wait_for_more()
        cluster.kubectl("exec", name, "--", "touch", "end")
        assert (whole.code(), tail.code()) == (0, 0), (whole.said, tail.said)
    finally:
        whole.program.kill()
        tail.program.kill()
    logged = cluster.kubectl("logs", name).splitlines()
    assert whole.lines == logged
    assert len(tail.lines) > 100
    assert tail.lines == logged[-len(tail.lines) :]


def start_pod(cluster: Cluster, name: str) -> None:
    container = {"name": "main", "image": BUSYBOX, "command": ["sh", "-c", LINES]}
    spec = {"restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(pod))
    cluster.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=240s")


class Followed:
    """The verb at work, and what it has printed."""

    def __init__(self, cluster: Cluster, pod: str, file: Path, options: list[str]) -> None:
        self._out, self._err = file.with_suffix(".out"), file.with_suffix(".err")
        command = [sys.executable, "-c", "from stoker.cli.main import main; main()", "logs", pod, "-f", *options]
        with self._out.open("w") as out, self._err.open("w") as err:
            environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
            self.program = subprocess.Popen(command, stdout=out, stderr=err, env=environment)

    @property
    def lines(self) -> list[str]:
        return self._out.read_text().splitlines()

    @property
    def said(self) -> str:
        return self._err.read_text()

    def wait_for_more(self) -> None:
        """Wait until a hundred more lines are printed."""
        seen = len(self.lines)
        assert wait_until(lambda: len(self.lines) > seen + 100, timeout_s=240, every_s=0.2), self.said

    def code(self) -> int:
        return self.program.wait(timeout=240)
