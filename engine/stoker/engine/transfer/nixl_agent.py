"""NIXL's agent: registered memory of this process, and writes into that of others by whatever connects the two hosts.

NIXL (the extra `nixl`) chooses the way with UCX: RDMA where the hosts have it, else shared memory or TCP. It is
imported when an agent is made. Used by `nixl_port`; its threads may call at once.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from stoker.engine.transfer.device_memory import Copy
from stoker.engine.transfer.ticket import PeerLost, TransferError

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""One for each version of CUDA; without a GPU either works."""
POLL_S = 50e-6
"""How often a write that is under way is looked at."""
LOOK_S = 0.005
"""How often the peer is, meanwhile."""

Kind = Literal["DRAM", "VRAM"]


class Region(NamedTuple):
    """Memory that agents read or write, in NIXL's words."""

    address: int
    num_bytes: int
    kind: Kind = "DRAM"
    device: int = 0


def load_nixl(packages: Sequence[str] = PACKAGES) -> Any:
    """NIXL's Python API. Raises TransferError: it is not installed, or does not work here."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    reasons = []
    for package in packages:
        try:
            return importlib.import_module(f"{package}._api")
        except ImportError as error:
            reasons.append(str(error))
    raise TransferError(f"NIXL is not installed (the extra `nixl` of stoker): {'; '.join(reasons)}")


class NixlAgent:
    """One agent of this process."""

    def __init__(self, name: str, regions: Sequence[Region], load: Callable[[], Any] = load_nixl) -> None:
        """Make an agent with these regions registered. `name`: unlike that of all agents it meets.

        Raises:
            TransferError: NIXL is not installed, or cannot use this memory.
        """
        api = load()
        self._agent: Any = None
        self._registered: list[Any] = []
        self._met: Counter[str] = Counter()
        """Links to each agent: a peer that connects again does so before its old link is closed."""
        self._lock = threading.Lock()
        try:
            strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"], sync_mode=strict))
            for address, num_bytes, kind, device in regions:
                self._registered.append(self._agent.register_memory([(address, num_bytes, device, "")], kind))
        except Exception as error:
            self.close()
            raise TransferError(f"NIXL: {error}") from error

    def describe(self) -> bytes:
        """What another agent needs to write here."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def meet(self, description: bytes) -> str:
        """Return the name of the agent of this description, which can be written to now. Raises TransferError."""
        with self._lock:
            try:
                found: str | bytes = self._agent.add_remote_agent(description)
            except Exception as error:
                raise TransferError(f"NIXL cannot use the peer's description: {error}") from error
            name = found if isinstance(found, str) else found.decode()
            self._met[name] += 1
        return name

    def part(self, name: str) -> None:
        """End one link to an agent; with the last one it is forgotten."""
        with self._lock:
            self._met[name] -= 1
            if self._met[name] > 0:
                return
            del self._met[name]
            with suppress(Exception):  # it is gone already
                self._agent.remove_remote_agent(name)

    def write(
        self, name: str, copies: Sequence[Copy], source: Region, target: Region, lost: Callable[[], str | None]
    ) -> None:
        """Copy between registered regions and wait for the end. `lost`: why the peer is gone, asked now and then.

        Raises:
            PeerLost: the peer is gone, or NIXL says that its connection is.
            TransferError: NIXL refuses the copies.
        """
        try:
            locals_ = self._agent.get_xfer_descs(
                [(copy.source, copy.num_bytes, source.device) for copy in copies], source.kind
            )
            remotes = self._agent.get_xfer_descs(
                [(copy.target, copy.num_bytes, target.device) for copy in copies], target.kind
            )
            handle = self._agent.initialize_xfer("WRITE", locals_, remotes, name)
        except Exception as error:
            raise TransferError(f"NIXL refuses the write: {error}") from error
        try:
            self._follow(handle, lost)
        finally:
            with suppress(Exception):  # of a peer that has gone
                self._agent.release_xfer_handle(handle)

    def _follow(self, handle: Any, lost: Callable[[], str | None]) -> None:
        try:
            state, looked_s = self._agent.transfer(handle), time.monotonic()
            while state == "PROC":
                time.sleep(POLL_S)
                state = self._agent.check_xfer_state(handle)
                if time.monotonic() - looked_s > LOOK_S:
                    looked_s = time.monotonic()
                    if (why := lost()) is not None:
                        raise PeerLost(why)
        except PeerLost:
            raise
        except Exception as error:
            raise PeerLost(f"NIXL: {error}") from error
        if state != "DONE":
            raise PeerLost(f"NIXL ended the write with {state}")

    def close(self) -> None:
        """Release the memory. May be called twice."""
        if self._agent is None:
            return
        for registered in self._registered:
            with suppress(Exception):  # the process gives it back in any case
                self._agent.deregister_memory(registered)
        self._registered.clear()
        self._agent = None
