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
    """Raised when kubectl fails; the text is its output."""


class Plane:
    """A ControlPlane with a kubectl."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self.control_plane = control_plane
        self.kubeconfig = Path(control_plane.kubeconfig)

    @property
    def access(self) -> Access:
        return read_kubeconfig(self.kubeconfig)

    def kubectl(self, *given: str, stdin: Any = None, timeout_s: float = 240) -> str:
        """Run kubectl and return its output; `stdin` is an object that it reads as JSON.

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
