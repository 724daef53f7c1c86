"""Requirements of the image build that this machine lacks, and the packages that bring them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

PROGRAMS = {
    "buildah": "buildah",
    "containers-storage": "containers-storage",
    "mmdebstrap": "mmdebstrap",
    "skopeo": "skopeo",
    "cp": "coreutils",
}
"""Program -> Debian package."""
FREE_BYTES = 15 * 10**9
"""Room for the first build: the layers as files, once more as archives in the seed store, and temporary
files.
"""


def missing(cache: Path) -> list[str]:
    """Return one line for each missing requirement; empty when images can be built."""
    lines = [
        f"no program {program}: apt-get install -y {package}"
        for program, package in PROGRAMS.items()
        if shutil.which(program) is None
    ]
    if os.geteuid() != 0:
        lines.append("building images needs root: buildah's chroot isolation and overlay mounts")
    if "\toverlay\n" not in Path("/proc/filesystems").read_text():
        lines.append("the kernel has no overlay file system")
    free = shutil.disk_usage(_existing(cache)).free
    if not (cache / "root").exists() and free < FREE_BYTES:
        lines.append(
            f"{free / 1e9:.0f} GB are free below {cache}, the first build of the images needs {FREE_BYTES / 1e9:.0f} GB"
        )
    return lines


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)
