"""Memory of this machine and its GPU: in all, and what a new allocation can have."""

from __future__ import annotations

from pathlib import Path

import torch

from stoker.pod.config_file import ConfigError


def refuse_oversize(field: str, needed: int, device: str) -> None:
    """Refuse more than the machine has in all. What other programs hold now may be free later."""
    total = torch.cuda.mem_get_info()[1] if device == "cuda" else main_memory("MemTotal")
    if total is not None and needed > total:
        raise ConfigError(f"{field} needs {needed} bytes, this {'GPU' if device == 'cuda' else 'machine'} has {total}")


def smallest_free_bytes(device: str, others_free_bytes: int | None) -> int:
    """Free memory of the rank that has least."""
    found = free_bytes(device)
    if found is None:
        raise ConfigError("cache.memory_bytes is needed: this system does not say how much memory is free")
    return found if others_free_bytes is None else min(found, others_free_bytes)


def free_bytes(device: str) -> int | None:
    """Bytes of memory that a new allocation can have; None where the system does not tell."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else main_memory("MemAvailable")


def main_memory(name: str) -> int | None:
    """Bytes in a line of Linux' /proc/meminfo; None on other systems."""
    path = Path("/proc/meminfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
