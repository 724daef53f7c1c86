"""Everything on this machine that a cluster could leave behind, as text to compare before and after."""

import subprocess
from pathlib import Path

from e2e.cluster import binaries, groups


def of_cluster(name: str) -> list[str]:
    """What bears the cluster's name: processes, mounts, cgroups, files. Empty when it is gone."""
    folder = binaries.cache() / "clusters" / name
    processes = [f"process {pid}: {command}" for pid, command in _commands() if f"{folder}/" in command]
    mounts = [f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines() if f"{folder}/" in line]
    cgroups = [f"cgroup {path}" for path in groups.find(f"stoker-{name}-*")]
    return [*processes, *mounts, *cgroups, *([f"folder {folder}"] if folder.exists() else [])]


def of_machine() -> set[str]:
    """Links, addresses, routes and firewall rules of this machine, without counters and times."""
    commands = (
        ("ip", "-oneline", "link"),
        ("ip", "-oneline", "address"),
        ("ip", "route"),
        ("ip", "rule"),
        ("iptables-save",),
    )
    lines = [
        line
        for command in commands
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    # every line of iptables-save's rules is kept, its time stamps and counters are not
    return {line.split(" [")[0] for line in lines if not line.startswith("#")}


def _commands() -> list[tuple[int, str]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((int(entry.name), (entry / "cmdline").read_text().replace("\0", " ")))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
    return found
