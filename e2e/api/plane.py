"""The control plane under test, as a test uses it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from e2e.api.access import Access, read_kubeconfig
from e2e.cluster import binaries
from e2e.cluster.control_plane import ControlPlane


class KubectlFailed(Exception):
    """kubectl ended with an error; the text is what it printed."""


class Plane:
    """A ControlPlane with a kubectl."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self.control_plane = control_plane
        self.kubeconfig = Path(control_plane.kubeconfig)

    @property
    def access(self) -> Access:
        return read_kubeconfig(self.kubeconfig)

    def kubectl(self, *given: str, stdin: Any = None, timeout_s: float = 30) -> str:
        """What kubectl prints; `stdin` is an object to be piped to it as JSON.

        Raises:
            KubectlFailed: with what it printed.
        """
        program = str(binaries.bin_folder() / "kubectl")
        text = None if stdin is None else json.dumps(stdin)
        command = [program, "--kubeconfig", str(self.kubeconfig), *given]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s, check=False)
        if done.returncode:
            raise KubectlFailed(done.stderr or done.stdout)
        return done.stdout
