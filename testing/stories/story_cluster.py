"""An embedded cluster for a story: a supervisor with real pods, read through its own API."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import httpx

from stoker.cli.supervisor_client import SupervisorClient, SupervisorError
from stoker.operator.cluster.kinds import find_kind
from stoker.operator.cluster.local.reservations import Reservations
from stoker.operator.cluster.local.socket_path import short_path
from stoker.operator.cluster.local.volumes import claim_folder
from testing.stories.object_views import Object as Object
from testing.stories.stage import Stage
from testing.stories.waits import TIMEOUT_S

NAMESPACE = "default"


class StoryCluster(Stage):
    """One state folder with its supervisor, a child of the test that ends with it."""

    def __init__(self, state: Path, addresses: str = "loopback") -> None:
        self.state = state
        self.addresses = addresses
        self.client = SupervisorClient(state)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start a supervisor, on a fresh state folder or on an earlier one's."""
        self.client.folders.make()
        command = [sys.executable, "-m", "stoker.operator.service.local.run_supervisor"]
        end, self._parent_pipe = os.pipe()  # the other end closes with the test's process, however it ends
        arguments = ["--state", str(self.client.folders.root), "--addresses", self.addresses, "--parent-pipe", str(end)]
        with self.client.folders.supervisor_log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.client.folders.root,
                pass_fds=[end],
            )
        os.close(end)
        self.wait_until(self.client.running, "the supervisor answers")

    def stop(self) -> None:
        """Stop like `stoker local down`: every pod gets its grace period."""
        assert self.process is not None
        self.client.down()
        assert self._wait() == 0

    def kill(self) -> None:
        """Kill the supervisor."""
        assert self.process is not None
        self.process.kill()
        self._wait()

    def end(self) -> None:
        """Clean up after a story, also after a failed one."""
        if self.process is None or self.process.poll() is not None:
            return
        with contextlib.suppress(SupervisorError):
            self.client.down(grace_s=3)
        try:
            self._wait()
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def _wait(self) -> int:
        assert self.process is not None
        code = self.process.wait(TIMEOUT_S)
        os.close(self._parent_pipe)
        return code

    def remains(self) -> list[str]:
        """Return the processes and sockets left of this cluster; none may be left after the supervisor has ended."""
        root = str(self.client.folders.root)
        short = (
            Path(tempfile.gettempdir()) / f"stoker-{hashlib.sha256(f'{os.getuid()}:{root}'.encode()).hexdigest()[:10]}"
        )
        return [*([str(short)] if short.is_symlink() else []), *self.runs()]

    def runs(self) -> list[str]:
        """Return the cluster's processes and sockets."""
        root = str(self.client.folders.root)
        return [*_processes(root), *_unix_sockets(root), *_listeners(self.client.folders.addresses)]

    # Commands of users

    def apply(self, *objects: Mapping[str, Any]) -> list[Object]:
        """Apply a manifest; a refusal fails the story."""
        results = self.try_apply(*objects)
        refused = [result for result in results if "error" in result]
        assert not refused, refused
        return results

    def try_apply(self, *objects: Mapping[str, Any]) -> list[Object]:
        named = []
        for found in objects:
            metadata = {"namespace": NAMESPACE, **found["metadata"]}
            named.append({**found, "metadata": metadata})
        return self.client.apply(named)

    def delete(self, kind: str, name: str) -> bool:
        """Delete an object; return True when it is gone already."""
        return self.client.delete(kind, NAMESPACE, name)

    # Objects and folders

    def all(self, kind: str, **labels: str) -> list[Object]:
        """Return the objects of a kind by labels below `stoker.dev/` (underscores for dashes), sorted by name."""
        found = self.client.objects(kind, namespace=NAMESPACE)
        for name, value in labels.items():
            key = f"stoker.dev/{name.replace('_', '-')}"
            found = [item for item in found if item["metadata"].get("labels", {}).get(key) == value]
        return sorted(found, key=lambda item: str(item["metadata"]["name"]))

    def find(self, kind: str, name: str) -> Object | None:
        return next((item for item in self.all(kind) if item["metadata"]["name"] == name), None)

    def log(self, pod: Mapping[str, Any]) -> str:
        return str(self.client.logs(NAMESPACE, pod["metadata"]["name"], 0)["text"])

    def claim_folder(self, name: str) -> Path:
        """Return the folder with the data of a claim."""
        return claim_folder(self.get("PersistentVolumeClaim", name), self.client.folders.claims / NAMESPACE / name)

    def url(self, service: str, port: int = 8000) -> str:
        """Return the address of a Service on this machine."""
        endpoints: dict[str, str] = self.client.status()["endpoints"]
        return endpoints[f"{NAMESPACE}/{service}:{port}"]

    # Waiting

    def wait_for_passing(self, kind: str, name: str, since: str, holds: Callable[[Object], Any], what: str) -> None:
        """Wait until `holds` has been true of an object after a version, however short: from the changes since then."""
        found, deadline = find_kind(kind), time.monotonic() + TIMEOUT_S
        place = f"http://supervisor/apis/{found.api_version}/namespaces/{NAMESPACE}/{found.plural}"
        asked = {"watch": "true", "resourceVersion": since, "fieldSelector": f"metadata.name={name}"}
        with (
            short_path(self.client.folders.socket) as socket_path,
            httpx.Client(transport=httpx.HTTPTransport(uds=socket_path), timeout=TIMEOUT_S) as client,
            client.stream("GET", place, params=asked) as answer,
        ):
            for line in answer.iter_lines():  # bookmarks come where nothing changes
                change = json.loads(line)
                if change["type"] in ("ADDED", "MODIFIED") and holds(change["object"]):
                    return
                assert time.monotonic() < deadline, f"not {what} after {TIMEOUT_S:g} s\n{self.picture(kind, name)}"
        raise AssertionError(f"not {what} before the watch ended")

    def wait_until_nothing_runs(self) -> None:
        """Wait for the end of the pods of a killed supervisor."""
        deadline = time.monotonic() + TIMEOUT_S
        while found := self.runs():
            assert time.monotonic() < deadline, found
            time.sleep(self.PAUSE_S)

    def picture(self, kind: str = "", name: str = "") -> str:
        """Return the state to print when a story makes no progress."""
        lines = []
        if kind and (found := self.find(kind, name)) is not None:
            status = {
                key: value for key, value in (found.get("status") or {}).items() if key not in ("pinned", "router")
            }
            lines += [json.dumps(status, indent=1), json.dumps(self.events(kind, name), indent=1)]
        for pod in self.pods():
            text = self.log(pod)
            lines += [f"--- {pod['metadata']['name']}: {(pod.get('status') or {}).get('phase')}", text[-1500:]]
        log = self.client.folders.supervisor_log
        lines += ["--- supervisor", log.read_text()[-3000:] if log.exists() else ""]
        return "\n".join(lines)


def _processes(root: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            where = str((folder / "cwd").readlink())
        except OSError:
            continue
        if int(folder.name) != os.getpid() and (where.startswith(root) or any(word.startswith(root) for word in words)):
            found.append(f"process {folder.name}: {' '.join(words)}")
    return found


def _unix_sockets(root: str) -> list[str]:
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if root in line]


def _listeners(addresses: Path) -> list[str]:
    """Return the TCP sockets that still listen on addresses of the cluster's pods and Services.

    An address that another cluster has taken since then is that one's, and none can take one while they are looked at.
    """
    if not addresses.exists():
        return []
    with Reservations() as names:
        return _listening(_left(json.loads(addresses.read_text()), names))


def _left(kept: Mapping[str, Any], names: Reservations) -> set[tuple[str, int | None]]:
    """Take the addresses that a cluster had, as (address, port or None for all); those of another one are left out."""
    hosts = kept["hosts"].values() if kept["block"] and names.take(f"block-{kept['block']}") else ()
    ports = [port for port in kept["ports"].values() if names.take(f"port-{port}")]
    return {(ip, None) for ip in hosts} | {("127.0.0.1", port) for port in ports}


def _listening(mine: Set[tuple[str, int | None]]) -> list[str]:
    listening = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        ip = socket.inet_ntoa(bytes.fromhex(local.split(":")[0])[::-1])
        port = int(local.split(":")[1], 16)
        if state == "0A" and ((ip, None) in mine or (ip, port) in mine):
            listening.append(f"listener {ip}:{port}")
    return listening
