"""The cgroups of one node.

Version 1: a subtree below this process's own group in every hierarchy. Version 2 alone: a subtree below the root.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 10_000
"""Period of a processor's quota."""


@dataclass(frozen=True)
class Hierarchy:
    """One line of `/proc/self/cgroup`."""

    controllers: str
    """`memory`, `cpu,cpuacct`, `name=systemd`; empty for the unified hierarchy."""

    path: str
    """This process's group in it, as the process sees it."""

    @property
    def mount(self) -> Path:
        """Return the mount point on this machine."""
        name = self.controllers.removeprefix("name=")
        if name:
            return ROOT / name
        return ROOT / "unified" if (ROOT / "unified").is_dir() else ROOT


def hierarchies(text: str) -> list[Hierarchy]:
    """Return the lines of `/proc/self/cgroup`."""
    parts = (line.split(":", 2) for line in text.splitlines())
    return [Hierarchy(controllers, path) for _, controllers, path in parts]


def make(name: str) -> list[Path]:
    """Make the group `name` below this process's group in every mounted hierarchy and return the folders."""
    made = []
    ours = hierarchies(Path("/proc/self/cgroup").read_text())
    for hierarchy in ours:
        if not (hierarchy.mount / "cgroup.procs").exists():
            continue
        parent = hierarchy.mount / hierarchy.path.strip("/") if len(ours) > 1 else _root_with_controllers()
        group = parent / name
        group.mkdir(exist_ok=True)
        if hierarchy.controllers == "cpuset":
            for file in ("cpuset.cpus", "cpuset.mems"):
                (group / file).write_text((parent / file).read_text())
        made.append(group)
    return made


def limit_processor(pid: int, share: float) -> None:
    """Give the group of a process this share of one processor from now on, in slices of 10 ms."""
    quota_us = round(share * PERIOD_US)
    for hierarchy in hierarchies(Path(f"/proc/{pid}/cgroup").read_text()):
        folder = hierarchy.mount / hierarchy.path.strip("/")
        if "cpu" in hierarchy.controllers.split(","):
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
            return
        if not hierarchy.controllers and (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
            return
    raise ClusterError(f"process {pid} is in no group that limits processors")


def remove(groups: list[Path], *, timeout_s: float = 10) -> None:
    """Remove the groups with everything below them.

    Raises:
        ClusterError: if a process is still in one of them.
    """
    deadline = time.monotonic() + timeout_s
    while left := [group for group in groups if not _removed(group)]:
        if time.monotonic() > deadline:
            raise ClusterError(f"cgroup {left[0]} cannot be removed, a process is still in it")
        time.sleep(0.05)


def find(name: str) -> list[Path]:
    """Return every group called `name` below this machine's hierarchies; used to check that nothing is left."""
    return sorted(path for path in ROOT.rglob(name) if path.is_dir())


def _root_with_controllers() -> Path:
    """Return the root of version 2.

    Only groups without processes delegate controllers; this process's group has some, and the root is exempt.
    """
    try:
        for controller in (ROOT / "cgroup.controllers").read_text().split():
            (ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
    except OSError as error:
        raise ClusterError(
            f"{ROOT} does not hand its controllers on ({error.strerror}): nodes need the machine's own cgroup root"
        ) from error
    return ROOT


def _removed(group: Path) -> bool:
    if not group.is_dir():
        return True
    inside = sorted(
        (path for path in group.rglob("*") if path.is_dir()), key=lambda path: len(path.parts), reverse=True
    )
    try:
        for path in (*inside, group):
            path.rmdir()
    except FileNotFoundError:
        return not group.is_dir()
    except OSError:
        return False  # its last process is on the way out
    return True
