"""A tunnel from this machine to a pod or a Service through the API server, as a user would open it."""

import re
import select
import subprocess
import time
from collections.abc import Sequence
from types import TracebackType

from e2e.cluster.errors import ClusterError

_LINE = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")
START_S = 120.0


class PortForward:
    """A `kubectl port-forward` that runs while the context is entered."""

    def __init__(self, kubectl: Sequence[str], namespace: str, target: str, port: int) -> None:
        self._target = target
        self._command = [
            *kubectl,
            "--namespace",
            namespace,
            "port-forward",
            "--address",
            "127.0.0.1",
            target,
            f":{port}",
        ]
        self.url = ""

    def __enter__(self) -> "PortForward":
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        )
        try:
            self.url = f"http://127.0.0.1:{self._local_port()}"
        except ClusterError:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _local_port(self) -> int:
        assert self._process.stdout is not None
        deadline = time.monotonic() + START_S
        said = ""
        while time.monotonic() < deadline:
            if select.select([self._process.stdout], [], [], 0.5)[0]:
                line = self._process.stdout.readline()
                if not line:
                    break
                said += line
                if match := _LINE.search(line):
                    return int(match.group(1))
        raise ClusterError(f"kubectl port-forward {self._target}: {said.strip() or f'no answer in {START_S:.0f} s'}")

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
