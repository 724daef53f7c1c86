"""Bring the files of an npm package: `npm pack`, checked against the hash in a lock file of this folder.

    python lock/npm.py LOCK TARGET

Part of `make setup`, for lock/console.json and lock/axe.json. Without npm or a network it prints one line that says
what is left out, and succeeds. A package whose hash differs is an error.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

STAMP = "package.json"
LONGEST_S = 120


def main(lock: Path, target: Path) -> int:
    """Fill the folder `target`, unless it holds the locked release already."""
    wanted = json.loads(lock.read_text(encoding="utf-8"))
    if is_there(target, wanted):
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            archive = fetch(wanted, Path(folder))
        except (OSError, subprocess.SubprocessError) as error:
            print(f"setup: {wanted['without']}: {wanted['name']} was not fetched ({error})")  # noqa: T201
            return 0
        check(archive, wanted["integrity"], lock)
        unpack(archive, wanted, target)
    return 0


def is_there(target: Path, wanted: dict[str, Any]) -> bool:
    """Whether the folder was filled from the same lock."""
    stamp = target / STAMP
    files = (target / name for name in wanted["files"].values())
    return stamp.exists() and json.loads(stamp.read_text()) == wanted and all(file.exists() for file in files)


def fetch(wanted: dict[str, Any], folder: Path) -> Path:
    """The package's archive. Raises OSError without npm, SubprocessError where it fails."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    package = f"{wanted['name']}@{wanted['version']}"
    command = [npm, "pack", package, "--silent", "--pack-destination", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_S)
    return next(folder.glob("*.tgz"))


def check(archive: Path, integrity: str, lock: Path) -> None:
    """Compare the archive with its hash in the form of npm: `sha512-BASE64`. Ends the program on a mismatch."""
    found = f"sha512-{base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()}"
    if found != integrity:
        sys.exit(f"setup: {archive.name} has the hash {found}, {lock.name} allows only {integrity}")


def unpack(archive: Path, wanted: dict[str, Any], target: Path) -> None:
    """Write the locked files, and the lock last."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    with tarfile.open(archive) as found:
        for member, name in wanted["files"].items():
            content = found.extractfile(member)
            assert content is not None, member
            (target / name).write_bytes(content.read())
    (target / STAMP).write_text(json.dumps(wanted), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python lock/npm.py LOCK TARGET")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
