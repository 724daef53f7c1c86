"""Bring the console's plotting library: `npm pack`, checked against the hash in lock/console.json.

    python lock/console.py TARGET

Part of `make setup`. Without npm or a network it prints one line and succeeds: the console then shows tables. A package
whose hash differs is an error.
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

LOCK = Path(__file__).with_name("console.json")
STAMP = "package.json"
LONGEST_S = 120


def main(target: Path) -> int:
    """Fill the folder `target`, unless it holds the locked release already."""
    wanted = json.loads(LOCK.read_text(encoding="utf-8"))
    if is_there(target, wanted):
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            archive = fetch(wanted, Path(folder))
        except (OSError, subprocess.SubprocessError) as error:
            print(f"setup: the console will show tables, not plots: {wanted['name']} was not fetched ({error})")  # noqa: T201
            return 0
        check(archive, wanted["integrity"])
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


def check(archive: Path, integrity: str) -> None:
    """Compare the archive with its hash in the form of npm: `sha512-BASE64`. Ends the program on a mismatch."""
    found = f"sha512-{base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()}"
    if found != integrity:
        sys.exit(f"setup: {archive.name} has the hash {found}, lock/console.json allows only {integrity}")


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
    if len(sys.argv) != 2:
        sys.exit("usage: python lock/console.py TARGET")
    sys.exit(main(Path(sys.argv[1])))
