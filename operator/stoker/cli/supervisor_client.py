"""The command line's side of the supervisor: its API over the Unix socket, and its start. Standard library only, for a quick start."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from stoker.operator.cluster.local.folders import StateFolders
from stoker.operator.cluster.local.socket_path import short_path

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0


class SupervisorError(Exception):
    """The supervisor refused; the message is its own."""


class NotRunning(SupervisorError):
    """No supervisor answers in this state folder."""


class SupervisorClient:
    """One state folder's supervisor. Every call raises SupervisorError; NotRunning when nobody answers."""

    def __init__(self, state: Path) -> None:
        self.folders = StateFolders(state.expanduser().resolve())
        self._process: subprocess.Popen[bytes] | None = None

    def status(self) -> dict[str, Any]:
        return self._ask("GET", "/v1/status")

    def running(self) -> bool:
        try:
            self.status()
        except NotRunning:
            return False
        return True

    def apply(self, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = self._ask("POST", "/v1/apply", {"objects": objects})["results"]
        return results

    def objects(self, kind: str, *, namespace: str | None = None, name: str | None = None) -> list[dict[str, Any]]:
        chosen = {key: value for key, value in (("namespace", namespace), ("name", name)) if value}
        items: list[dict[str, Any]] = self._ask("GET", f"/v1/objects/{quote(kind)}?{urlencode(chosen)}")["items"]
        return items

    def delete(self, kind: str, namespace: str, name: str) -> bool:
        """True when it is gone already."""
        return bool(self._ask("DELETE", f"/v1/objects/{quote(kind)}/{quote(namespace)}/{quote(name)}")["gone"])

    def logs(self, namespace: str, pod: str, offset: int) -> dict[str, Any]:
        return self._ask("GET", f"/v1/logs/{quote(namespace)}/{quote(pod)}?offset={offset}")

    def detach(self) -> None:
        self._ask("POST", "/v1/detach", {})

    def down(self, grace_s: float | None = None) -> None:
        """Ask for the end and wait until the supervisor has gone."""
        pid = int(self.status()["pid"])
        self._ask("POST", "/v1/down", {"grace_s": grace_s})
        if self._process is not None and self._process.pid == pid:
            self._process.wait()
        while _lives(pid):
            time.sleep(0.02)

    def start(self, addresses: str, *, leashed: bool) -> None:
        """Start a supervisor and wait until it answers.

        Args:
            leashed: it ends (with every pod) when this process does.

        Raises:
            SupervisorError: it ended at once; the message has the end of its log.
        """
        try:
            self.folders.make()
        except OSError as error:
            raise SupervisorError(f"state folder {self.folders.root}: {error.filename}: {error.strerror}") from error
        command = [sys.executable, "-m", "stoker.operator.service.local.run_supervisor"]
        command += ["--state", str(self.folders.root), "--addresses", addresses]
        pass_fds: tuple[int, ...] = ()
        if leashed:
            end, self._leash = os.pipe()  # the other end closes with this process, however it ends
            command += ["--leash", str(end)]
            pass_fds = (end,)
        with self.folders.supervisor_log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=pass_fds,
                cwd=self.folders.root,
            )
        for end in pass_fds:
            os.close(end)
        self._process = process
        self._wait_for_start(process)

    def _wait_for_start(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.running():
            code = process.poll()
            if code is not None or time.monotonic() > deadline:
                raise SupervisorError(
                    f"the supervisor did not start ({code=}); the end of {self.folders.supervisor_log}:\n{self._log_end()}"
                )
            time.sleep(0.02)

    def _log_end(self) -> str:
        lines = self.folders.supervisor_log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        connection = _SocketConnection(self.folders.socket)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            content = json.loads(answer.read())
        except (FileNotFoundError, ConnectionError, TimeoutError, http.client.HTTPException) as error:
            raise NotRunning(f"no supervisor runs in {self.folders.root}") from error
        finally:
            connection.close()
        if answer.status >= 300:
            raise SupervisorError(str(content.get("error", content)))
        found: dict[str, Any] = content
        return found


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("supervisor", timeout=ANSWER_TIMEOUT_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        if not self.path.exists():
            raise FileNotFoundError(self.path)
        with short_path(self.path) as path:
            self.sock.connect(path)


def _lives(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
