"""NIXL's agent and what it says of its errors, and which hosts can do RDMA. Its links are tested with all others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from stoker.engine.transfer.device_memory import Copy
from stoker.engine.transfer.nixl_agent import NixlAgent, Region, load_nixl
from stoker.engine.transfer.rdma_ports import count_rdma_ports
from stoker.engine.transfer.ticket import PeerLost, TransferError


def region(memory_N: np.ndarray) -> Region:
    return Region(memory_N.ctypes.data, memory_N.nbytes)


def test_an_agent_writes_into_registered_memory_and_nowhere_else() -> None:
    ours, theirs = np.arange(4096, dtype=np.uint8), np.zeros(4096, dtype=np.uint8)
    source, target = region(ours), region(theirs)
    writer, receiver = NixlAgent("writer", [source]), NixlAgent("receiver", [target])
    name = writer.meet(receiver.describe())
    writer.write(name, [Copy(source.address + 100, target.address + 1000, 50)], source, target, lambda: None)
    assert (theirs[1000:1050] == ours[100:150]).all()
    assert not theirs[:1000].any()
    assert not theirs[1050:].any()
    with pytest.raises(TransferError, match="NIXL refuses the write"):
        writer.write(name, [Copy(source.address, target.address + 4090, 50)], source, target, lambda: None)
    with pytest.raises(TransferError, match="NIXL cannot use the peer's description"):
        writer.meet(b"not a description")
    writer.part(name)
    with pytest.raises(TransferError):
        writer.write(name, [Copy(source.address, target.address, 50)], source, target, lambda: None)
    for agent in (writer, receiver, writer):
        agent.close()


def test_a_peer_that_was_met_twice_is_forgotten_with_its_last_link() -> None:
    """It connects again before its old link is closed."""
    ours, theirs = np.arange(256, dtype=np.uint8), np.zeros(256, dtype=np.uint8)
    source, target = region(ours), region(theirs)
    writer, receiver = NixlAgent("writer", [source]), NixlAgent("receiver", [target])
    old, new = writer.meet(receiver.describe()), writer.meet(receiver.describe())
    writer.part(old)
    writer.write(new, [Copy(source.address, target.address, 256)], source, target, lambda: None)
    assert (theirs == ours).all()
    writer.part(new)
    with pytest.raises(TransferError):
        writer.write(new, [Copy(source.address, target.address, 256)], source, target, lambda: None)
    for agent in (writer, receiver):
        agent.close()


class Stuck:
    """A stand-in for NIXL, whose writes do not end."""

    nixl_thread_sync_t = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=2)

    def __init__(self) -> None:
        self.released = 0

    def __call__(self) -> Stuck:
        return self

    def nixl_agent_config(self, **_: object) -> None:
        return None

    def nixl_agent(self, *_: object) -> Stuck:
        return self

    def get_xfer_descs(self, *_: object) -> None:
        return None

    def initialize_xfer(self, *_: object) -> str:
        return "handle"

    def transfer(self, _: object) -> str:
        return "PROC"

    def check_xfer_state(self, _: object) -> str:
        return "PROC"

    def release_xfer_handle(self, _: object) -> None:
        self.released += 1
        raise RuntimeError("still under way")


def test_a_write_ends_when_its_peer_is_gone() -> None:
    """However long NIXL would go on: the connection beside it knows first."""
    stuck, nowhere = Stuck(), Region(0, 0)
    writer = NixlAgent("writer", [], stuck)
    with pytest.raises(PeerLost, match=r"^the peer is gone$"):
        writer.write("receiver", [], nowhere, nowhere, lambda: "the peer is gone")
    assert stuck.released == 1
    writer.close()


def test_without_nixl_the_extra_is_named() -> None:
    with pytest.raises(TransferError, match=r"^NIXL is not installed \(the extra `nixl` of stoker\): No module named"):
        NixlAgent("writer", [], lambda: load_nixl(["no_such_package"]))


def test_active_ports_are_counted(tmp_path: Path) -> None:
    assert count_rdma_ports(tmp_path / "none") == 0
    for device, port, state in (("mlx5_0", 1, "4: ACTIVE"), ("mlx5_0", 2, "1: DOWN"), ("mlx5_1", 1, "4: ACTIVE")):
        folder = tmp_path / device / "ports" / str(port)
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
    assert count_rdma_ports(tmp_path) == 2
