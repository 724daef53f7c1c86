"""Traces that a cluster could leave behind on this machine, as text."""

import subprocess
from pathlib import Path

from e2e.cluster import binaries, groups
from e2e.cluster.network import Network


def of_cluster(name: str) -> list[str]:
    """Return the processes, mounts, cgroups and files with the cluster's name; empty when it is gone."""
    folder = binaries.cache() / "clusters" / name
    processes = [f"process {pid}: {command}" for pid, command in _commands() if f"{folder}/" in command]
    mounts = [f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if f"{folder}/" in line]
    cgroups = [f"cgroup {path}" for path in groups.find(f"stoker-{name}.*")]
    return [*processes, *mounts, *cgroups, *([f"folder {folder}"] if folder.exists() else [])]


def of_machine(addresses: Network) -> list[str]:
    """Return this machine's links, addresses, routes and firewall rules of a cluster's network.

    Empty when it is gone.
    """
    commands = (
        ("ip", "-oneline", "link"),
        ("ip", "-oneline", "address"),
        ("ip", "route"),
        ("ip", "rule"),
        ("iptables-save",),
    )
    printed = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for command in commands]
    return [
        line
        for text in printed
        for line in text.splitlines()
        if addresses.bridge in line or f"10.{addresses.octet}." in line
    ]


def _commands() -> list[tuple[int, str]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((int(entry.name), (entry / "cmdline").read_text().replace("\0", " ")))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
    return found
