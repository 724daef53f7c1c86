"""Requirements that this machine lacks for a cluster, one line each, checked before the start."""

import os
import shutil
import subprocess
from pathlib import Path

from e2e.cluster import binaries, tools
from e2e.cluster.errors import Unprepared

PROGRAMS = {
    "ip": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "runc": "runc",
    "busybox": "busybox-static",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "socat": "socat",
}
"""Program -> the Debian package that has it."""

FREE_DISK_BYTES = 2 * 10**9
FREE_MEMORY_BYTES = 15 * 10**8
_NETWORK_PROBE = """
ip link add probe type bridge && ip link add one type veth peer name two \\
    && iptables -t nat -A PREROUTING -m comment --comment probe -j ACCEPT
"""
"""Run in a network namespace of its own, which ends with it."""


def missing(*, building: bool = True) -> list[str]:
    """Return one line for each missing requirement; empty when a cluster can start.

    Args:
        building: missing programs are no fault because Go may build them.
    """
    packages = [
        f"no program {name}: apt-get install -y {package}"
        for name, package in PROGRAMS.items()
        if shutil.which(name) is None
    ]
    lines = [*packages, *_missing_programs(building), *_missing_room()]
    if os.geteuid() != 0:
        return [*lines, "not root: nodes need mounts, network namespaces and cgroups"]
    return [*lines, *_missing_in_kernel()]


def check(*, building: bool = True) -> None:
    """Refuse a machine that lacks a requirement.

    Raises:
        Unprepared: with a line for each missing requirement.
    """
    if lines := missing(building=building):
        raise Unprepared("\n".join(lines))


def _missing_programs(building: bool) -> list[str]:
    folder = binaries.bin_folder()
    absent = [name for tool in tools.ALL for name in binaries.missing_programs(tool, folder)]
    if not absent or (building and shutil.which("go") and not os.environ.get(binaries.BIN_VARIABLE)):
        return []
    advice = "build them with `make kube-binaries`, which needs Go 1.26 (https://go.dev/dl)"
    return [f"no {', '.join(absent)} in {folder}: {advice}, or set {binaries.BIN_VARIABLE}"]


def _missing_room() -> list[str]:
    lines = []
    folder = binaries.cache()
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < FREE_DISK_BYTES:
        lines.append(f"{free / 1e9:.1f} GB of disk free below {folder}: a cluster needs {FREE_DISK_BYTES / 1e9:.0f} GB")
    if (free := _available_memory_bytes()) < FREE_MEMORY_BYTES:
        lines.append(f"{free / 1e9:.1f} GB of memory available: a cluster needs {FREE_MEMORY_BYTES / 1e9:.1f} GB")
    return lines


def _missing_in_kernel() -> list[str]:
    lines = []
    for name in ("mnt", "pid", "net", "cgroup", "ipc", "uts"):
        if not Path("/proc/self/ns", name).exists():
            lines.append(f"the kernel has no {name} namespaces")
    if "\toverlay\n" not in Path("/proc/filesystems").read_text():
        lines.append("the kernel has no overlay file system (modprobe overlay)")
    if not any(Path("/sys/fs/cgroup").glob("**/cgroup.procs")):
        lines.append("no cgroup hierarchy is mounted below /sys/fs/cgroup")
    if shutil.which("unshare") and shutil.which("ip") and shutil.which("iptables"):
        probe = subprocess.run(["unshare", "--net", "sh", "-c", _NETWORK_PROBE], capture_output=True, text=True)
        if probe.returncode:
            lines.append(f"the kernel refuses bridges, cables or address translation: {' '.join(probe.stderr.split())}")
    return lines


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0
