"""The operator's program as a process on a real API server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
SOURCES = ("model", "operator")
SHORT_LEASE = {"duration_s": 6, "renew_deadline_s": 4, "retry_s": 0.5}


class Replica:
    """One process of the operator."""

    def __init__(
        self, kubeconfig: Path, folder: Path, name: str, namespace: str, checkout: Path = ROOT, **given: Any
    ) -> None:
        """Start it, with the sources of `checkout`."""
        config = {
            "namespace": namespace,
            "namespaces": [namespace],
            "identity": name,
            "api": {"kubeconfig": str(kubeconfig)},
            "listen": {"host": "127.0.0.1", "port": 0},
            "lease": SHORT_LEASE,
            **given,
        }
        file = folder / f"{name}.json"
        file.write_text(json.dumps(config))
        path = os.pathsep.join(str(checkout / part) for part in SOURCES)
        self.log = (folder / f"{name}.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stoker.operator", "--config", str(file)],
            env={**os.environ, "PYTHONPATH": path},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    @property
    def port(self) -> int:
        """The port from its log; 0 before it listens."""
        found = re.search(r"listens on port (\d+)", self.text)
        return int(found[1]) if found else 0

    @property
    def text(self) -> str:
        """The log so far."""
        return Path(self.log.name).read_text(encoding="utf-8")

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=120, trust_env=False)

    def status(self) -> dict[str, Any]:
        return dict(self.get("/status").json()) if self.port else {}

    def is_ready(self) -> bool:
        return bool(self.port) and self.get("/readyz").status_code == 200

    def leads(self) -> bool:
        return bool(self.status().get("leading") and self.status().get("synced"))

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=240)


def eventually(reached: Callable[[], bool], within_s: float = 240) -> float:
    """Wait until the condition holds and return the seconds that it took."""
    began = time.monotonic()
    while time.monotonic() < began + within_s:
        if reached():
            return time.monotonic() - began
        time.sleep(0.05)
    raise AssertionError(f"it did not happen in {within_s:g} s")
