"""Network ports of this host that can do RDMA, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path

DEVICES = Path("/sys/class/infiniband")


def count_rdma_ports(devices: Path = DEVICES) -> int:
    """Active ports of InfiniBand or RoCE; 0 where the host shows none, as a container without access to them does."""
    states = (state.read_text(encoding="ascii") for state in sorted(devices.glob("*/ports/*/state")))
    return sum("ACTIVE" in state for state in states)
