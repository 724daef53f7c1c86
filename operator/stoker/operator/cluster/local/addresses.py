"""Addresses of the pods and Services of the embedded cluster: fixed by name before anything starts, kept in a file.

`loopback` gives each its own address in 127.0.0.0/8 and leaves ports alone (Linux). `ports` gives each port of each
name a free port of 127.0.0.1.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stoker.operator.cluster.local.whole_file import DamagedFile, set_aside, write_whole

log = logging.getLogger(__name__)

Mode = Literal["loopback", "ports"]

PORT_RANGE = range(20000, 32000)
"""Ports below the range that systems use for outgoing connections."""
BLOCKS = range(16, 255)
FIRST_FREE_PORT = 1024
MOVED_BY = 8000


class AddressError(OSError):
    """No address is left."""


class Host(NamedTuple):
    """A name inside the cluster: `pod` by its host name, or `service`."""

    role: Literal["pod", "service"]
    namespace: str
    name: str


class Addresses:
    """Addresses of one state folder.

    Args:
        reserve: reserves a block of addresses, or a port, by name on this machine; False when another process has it.
    """

    def __init__(self, mode: Mode, reserve: Callable[[str], bool], file: Path | None = None) -> None:
        if mode == "loopback" and sys.platform != "linux":
            raise AddressError("addresses: loopback needs Linux (127.x addresses); use ports here")
        self.mode = mode
        self.file = file
        self.reserve = reserve
        self._hosts: dict[str, str] = {}
        self._ports: dict[str, int] = {}
        self._block = 0
        self.problem = ""
        """What was wrong with the file; empty when nothing was."""
        self._load()

    def ip(self, host: Host) -> str:
        """The host's address; once given it never changes."""
        if self.mode == "ports":
            return "127.0.0.1"
        name = "/".join(host)
        if name not in self._hosts:
            number = len(self._hosts) + 2  # .0.0 and .0.1 stay free
            if number > 0xFFFF:
                raise AddressError("all 65,534 loopback addresses of this state folder are taken")
            self._hosts[name] = f"127.{self._reserve_block()}.{number >> 8}.{number & 0xFF}"
            self._save()
        return self._hosts[name]

    def port(self, host: Host, port: int, run: int = 1) -> int:
        """The local port of the host's `port`. Ports that only root may open move up: 80 is 8080, 443 is 8443.

        `run`: so many local ports from there on are the host's.
        """
        if self.mode == "loopback":
            return port if port >= FIRST_FREE_PORT else port + MOVED_BY
        name = f"{'/'.join(host)}:{port}"
        if name not in self._ports:
            first = self._free_run(run)
            self._ports[name] = first
            self._ports |= {f"{name}+{place}": first + place for place in range(1, run)}
            self._save()
        return self._ports[name]

    def _reserve_block(self) -> int:
        if not self._block:
            found = next((block for block in BLOCKS if self.reserve(f"block-{block}")), None)
            if found is None:
                raise AddressError("every block of loopback addresses is taken by another supervisor; use ports")
            self._block = found
        return self._block

    def _free_run(self, count: int) -> int:
        """Return the first of so many free ports in a row."""
        taken, row = set(self._ports.values()), 0
        for port in PORT_RANGE:
            row = row + 1 if port not in taken and _is_free(port) and self.reserve(f"port-{port}") else 0
            if row == count:
                return port - count + 1
        raise AddressError(f"no {count} ports in a row are free in {PORT_RANGE.start}-{PORT_RANGE.stop - 1}")

    def _load(self) -> None:
        kept = self._read()
        if kept is None:
            return
        if kept["mode"] != self.mode:
            raise AddressError(f"{self.file}: this state folder uses addresses: {kept['mode']}, not {self.mode}")
        if kept["block"] and self.reserve(f"block-{kept['block']}"):
            self._block, self._hosts = kept["block"], kept["hosts"]
        self._ports = {name: port for name, port in kept["ports"].items() if self.reserve(f"port-{port}")}

    def _read(self) -> dict[str, Any] | None:
        """Read the file; a damaged one is set aside, and new addresses are given."""
        if self.file is None or not self.file.exists():
            return None
        try:
            kept: dict[str, Any] = json.loads(self.file.read_bytes())
            if not (isinstance(kept["mode"], str) and isinstance(kept["block"], int)):
                raise DamagedFile("not the addresses of an embedded cluster")
            dict(kept["hosts"]), dict(kept["ports"])
        except (ValueError, KeyError, TypeError) as error:
            self.problem = f"{set_aside(self.file)}: damaged ({error}); pods and Services have new addresses"
            log.error("%s", self.problem)
            return None
        return kept

    def _save(self) -> None:
        """Write the addresses for the next supervisor. If that fails, they are still valid for this one."""
        if self.file is None:
            return
        kept = {"mode": self.mode, "block": self._block, "hosts": self._hosts, "ports": self._ports}
        try:
            write_whole(self.file, json.dumps(kept).encode())
        except OSError as error:
            log.warning("%s: not written: %s", self.file, error.strerror)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
