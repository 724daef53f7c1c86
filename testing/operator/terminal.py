"""A user's terminal in tests: `stoker local` as subprocesses on one state folder, and a small web server to apply."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

SERVER = """
import http.server, json, os, sys
config = json.load(open('/etc/web/config.json'))
print('serving', config['greeting'], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(config['greeting'].encode())
    def log_message(self, *given): pass
http.server.ThreadingHTTPServer((config['listen']['host'], config['listen']['port']), Handler).serve_forever()
"""
PODS = 2
LONGEST_S = 300.0
"""Longest time of one command, which may start a supervisor; a busy machine is slow."""


def manifests() -> list[dict[str, Any]]:
    """Return the manifests of a web server: two pods behind a Service."""
    config = {"listen": {"host": "0.0.0.0", "port": 8000}, "greeting": "hello"}
    found: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "web"},
            "data": {"config.json": json.dumps(config)},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web"},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]},
        },
    ]
    for number in range(PODS):
        container = {
            "name": "main",
            "command": ["python", "-S", "-c", SERVER],
            "ports": [{"name": "http", "containerPort": 8000}],
            "readinessProbe": {"httpGet": {"path": "/", "port": "http"}},
            "volumeMounts": [{"name": "config", "mountPath": "/etc/web"}],
        }
        found.append(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"web-{number}", "labels": {"app": "web"}},
                "spec": {
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": 2,
                    "volumes": [{"name": "config", "configMap": {"name": "web"}}],
                    "containers": [container],
                },
            }
        )
    return found


class Terminal:
    """A terminal that runs `stoker local` on one state folder."""

    def __init__(self, folder: Path, user: int | None = None, python: str = sys.executable) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.user = user
        self.python = python
        self.file = folder / "web.yaml"
        self.file.write_text(yaml.safe_dump_all(manifests()))

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.python, "-m", "stoker.cli.main", "local", *words, "--state", str(self.state)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **(as_user(self.user, self.folder) if self.user is not None else {}),
        )

    def run(self, *words: str, code: int = 0) -> str:
        process = self.start(*words)
        out, err = process.communicate(timeout=LONGEST_S)
        assert process.returncode == code, (out, err)
        return out + err

    def json(self, *words: str) -> Any:
        process = self.start(*words, "--json")
        out, err = process.communicate(timeout=LONGEST_S)
        assert process.returncode == 0, (out, err)
        return json.loads(out)

    def running(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.json("get", "pods")["items"] if _is_ready(pod)]

    def supervisor(self) -> int:
        return int(self.json("status")["pid"])

    def processes(self) -> list[int]:
        """Return every live process that refers to the state folder."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes() + (entry / "cwd").readlink().as_posix().encode()
                except OSError:
                    continue
                if str(self.state).encode() in line:
                    found.append(int(entry.name))
        return found

    def end(self) -> None:
        """Kill what is left of the cluster."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):  # it may end by itself meanwhile
                os.kill(pid, signal.SIGKILL)


def _is_ready(pod: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))


def until(check: Callable[[], bool], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def as_user(user: int, home: Path) -> dict[str, Any]:
    """Return the options of a subprocess that runs as another user, with this process's packages."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return {"user": user, "group": user, "extra_groups": [], "env": environment, "cwd": home}
