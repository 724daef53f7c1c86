"""A client of the supervisor's API over its Unix socket, and the start of a supervisor. Standard library only.

Called by `local` and `progress`. It decides nothing about objects.
"""

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
from typing import IO, Any
from urllib.parse import quote, urlencode

from stoker.cli.run_history import PathError
from stoker.operator.cluster.kinds import Kind
from stoker.operator.cluster.local.folders import StateFolders
from stoker.operator.cluster.local.socket_path import short_path
from stoker.operator.cluster.local.state_lock import holder_pid, is_held

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
SOCKET_PATIENCE_S = 10.0
"""Time to wait for the socket of a supervisor that starts, or whose socket was deleted."""
NOT_FOUND = 404
MAX_SHOWN = 300
"""Characters of an answer that is no JSON."""


class SupervisorError(Exception):
    """The supervisor refused or failed; the message is for people, `status` that of its answer (0 without one)."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NotRunning(SupervisorError):
    """No supervisor holds the state folder."""


class NoAnswer(SupervisorError):
    """A supervisor holds the state folder but does not answer."""


class SupervisorClient:
    """A client of the supervisor of one state folder.

    Every call raises SupervisorError: NotRunning only when the folder's lock is free, NoAnswer when it is held.
    """

    def __init__(self, state: Path, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self.folders = StateFolders(state.expanduser().resolve())
        self.timeout_s = timeout_s
        self.problems: list[str] = []
        """What the supervisor reported about its state folder in the last answer."""
        self._process: subprocess.Popen[bytes] | None = None

    def status(self) -> dict[str, Any]:
        return self._ask("GET", "/v1/status")

    def running(self) -> bool:
        """Whether a supervisor answers. Raises NoAnswer."""
        try:
            self.status()
        except NotRunning:
            return False
        return True

    def apply(self, objects: list[dict[str, Any]], *, recreate_lost: bool = False) -> list[dict[str, Any]]:
        """Apply objects, each on its own; a result per object. With `recreate_lost` also those whose file is lost."""
        body = {"objects": objects, "recreate_lost": recreate_lost}
        results: list[dict[str, Any]] = self._ask("POST", "/v1/apply", body)["results"]
        return results

    def objects(self, kind: str, *, namespace: str | None = None, name: str | None = None) -> list[dict[str, Any]]:
        chosen = {key: value for key, value in (("namespace", namespace), ("name", name)) if value}
        items: list[dict[str, Any]] = self._ask("GET", f"/v1/objects/{quote(kind)}?{urlencode(chosen)}")["items"]
        return items

    def delete(self, kind: str, namespace: str, name: str) -> bool:
        """Begin to delete an object; True when it is gone already."""
        return bool(self._ask("DELETE", f"/v1/objects/{quote(kind)}/{quote(namespace)}/{quote(name)}")["gone"])

    def scale(self, kind: Kind, namespace: str, name: str, replicas: int) -> None:
        """Write the `/scale` of an object. Raises PathError."""
        path = f"/apis/{kind.api_version}/namespaces/{quote(namespace)}/{kind.plural}/{quote(name)}/scale"
        self.ask("PUT", path, {"spec": {"replicas": replicas}})

    def logs(self, namespace: str, pod: str, offset: int) -> dict[str, Any]:
        return self._ask("GET", f"/v1/logs/{quote(namespace)}/{quote(pod)}?offset={offset}")

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        """Send a request to a path of the Kubernetes API that the supervisor serves. Raises PathError."""
        self.status()  # raises while none runs
        try:
            status, text = self._request(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            raise PathError(str(error), 0) from error
        if status >= 300:
            raise PathError(_refusal(text), status)
        return text

    def detach(self) -> None:
        self._ask("POST", "/v1/detach", {})

    def down(self, grace_s: float | None = None) -> None:
        """Stop the supervisor and wait until its process has ended."""
        pid = int(self.status()["pid"])
        self._ask("POST", "/v1/down", {"grace_s": grace_s})
        if self._process is not None and self._process.pid == pid:
            self._process.wait()
        while _lives(pid):
            time.sleep(0.02)

    def start(self, addresses: str, *, attached: bool) -> None:
        """Start a supervisor and wait until it answers.

        Args:
            attached: whether the supervisor ends, with every pod, when this process does.

        Raises:
            SupervisorError: it ended at once, or did not answer in time; the message has the end of its log.
        """
        try:
            self.folders.make()
            log = self.folders.supervisor_log.open("ab")
        except OSError as error:
            raise SupervisorError(f"state folder {self.folders.root}: {error.filename}: {error.strerror}") from error
        with log:
            self._process = self._launch(addresses, log, attached=attached)
        self._wait_for_start(self._process)

    def _launch(self, addresses: str, log: IO[bytes], *, attached: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "stoker.operator.service.local.run_supervisor"]
        command += ["--state", str(self.folders.root), "--addresses", addresses]
        pass_fds: tuple[int, ...] = ()
        if attached:
            end, self._parent_pipe = os.pipe()  # the kernel closes it when this process ends
            command += ["--parent-pipe", str(end)]
            pass_fds = (end,)
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
        return process

    def _wait_for_start(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            code = process.poll()
            if code is not None or time.monotonic() > deadline:
                process.terminate()  # one that is only slow must not stay behind
                end = f"the end of {self.folders.supervisor_log}:\n{self._log_end()}"
                raise SupervisorError(f"the supervisor did not start (exit code {code}); {end}")
            time.sleep(0.02)

    def _answers(self) -> bool:
        """Whether the supervisor that is being started answers yet."""
        try:
            self._request("GET", "/v1/status", None)
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _log_end(self) -> str:
        lines = self.folders.supervisor_log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        deadline = time.monotonic() + SOCKET_PATIENCE_S
        while True:
            try:
                status, text = self._request(method, path, body)
                break
            except (FileNotFoundError, ConnectionRefusedError) as error:  # no socket: not started yet, or deleted
                self._check_held()
                if time.monotonic() > deadline:
                    raise NoAnswer(self._silence()) from error
                time.sleep(0.05)
            except (OSError, http.client.HTTPException) as error:
                self._check_held()
                raise NoAnswer(self._silence()) from error
        return self._content(status, text)

    def _check_held(self) -> None:
        """Raise NotRunning when the lock of the folder is free."""
        try:
            held = is_held(self.folders)
        except OSError as error:
            raise SupervisorError(f"state folder {self.folders.root}: {error.strerror}") from error
        if not held:
            raise NotRunning(
                f"no supervisor runs in {self.folders.root}; --state names another state folder, "
                "stoker local apply -f FILE starts one"
            )

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, str]:
        """Send a request; status code and text of the answer. Raises OSError, http.client.HTTPException."""
        connection = _SocketConnection(self.folders.socket, self.timeout_s)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        finally:
            connection.close()

    def _content(self, status: int, text: str) -> dict[str, Any]:
        """Parse an answer. Raises SupervisorError, with the answer's text where it is no JSON object."""
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            shown = " ".join(text.split())[:MAX_SHOWN]
            where = f"its log: {self.folders.supervisor_log}"
            raise SupervisorError(f"the supervisor answered HTTP {status}: {shown!r} ({where})")
        if status >= 300:
            raise SupervisorError(str(found.get("error", found)), status)
        self.problems = found.get("problems", self.problems)
        return found

    def _silence(self) -> str:
        pid = holder_pid(self.folders)
        who = "a supervisor" if pid is None else f"a supervisor (pid {pid})"
        kill = "kill it" if pid is None else f"end it with: kill -9 {pid}"
        return (
            f"{who} holds {self.folders.root} but does not answer. It may be stopped or busy: look at "
            f"{self.folders.supervisor_log}, try again, or {kill} (its pods end with it; the state stays)"
        )


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("supervisor", timeout=timeout_s)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        if not self.path.exists():
            raise FileNotFoundError(self.path)
        with short_path(self.path) as path:
            self.sock.connect(path)


def _refusal(text: str) -> str:
    """The message of a `Status`, or the text itself."""
    try:
        found = json.loads(text)
        return str(found.get("message") or found.get("error") or text)[:MAX_SHOWN]
    except (ValueError, AttributeError):
        return text[:MAX_SHOWN]


def _lives(pid: int) -> bool:
    """Whether a process runs; one that only waits to be collected does not."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
