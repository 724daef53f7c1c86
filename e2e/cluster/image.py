"""A small image of this machine's static busybox, written without a builder.

It is the `pause` image of pods and the shell of tests.

localhost/stoker/busybox:1     every applet in /bin; without a command it sleeps
"""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from e2e.cluster.errors import ClusterError

BUSYBOX = "localhost/stoker/busybox:1"
_OCI = "application/vnd.oci.image"
_FOLDERS = {
    "bin": 0o755,
    "tmp": 0o1777,
    "etc": 0o755,
    "proc": 0o755,
    "sys": 0o755,
    "dev": 0o755,
    "var/run": 0o755,
    "root": 0o755,
}


def busybox_archive(folder: Path) -> Path:
    """Write an OCI archive of the image `BUSYBOX` into `folder`, unless it is there.

    The same busybox always gives the same bytes.

    Raises:
        ClusterError: if this machine has no static busybox.
    """
    program = shutil.which("busybox")
    if program is None:
        raise ClusterError("no busybox on the PATH: apt-get install busybox-static")
    content = Path(program).read_bytes()
    archive = folder / f"busybox-{hashlib.sha256(content).hexdigest()[:12]}.tar"
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        applets = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
        draft = archive.with_suffix(".draft")
        draft.write_bytes(_archive(BUSYBOX, _layer(content, applets)))
        draft.rename(archive)
    return archive


def _layer(program: bytes, applets: list[str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, mode in _FOLDERS.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        entry = tarfile.TarInfo("bin/busybox")
        entry.size, entry.mode = len(program), 0o755
        tar.addfile(entry, io.BytesIO(program))
        for applet in sorted({*applets, "sh"} - {"busybox"}):
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    return buffer.getvalue()


def _archive(name: str, layer: bytes) -> bytes:
    """Return an image with one layer as the tar that `ctr images import` reads."""
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["sleep", "2147483647"], "Env": ["PATH=/bin"], "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    blobs = [layer, _json(config)]
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_OCI}.manifest.v1+json",
        "config": _descriptor(f"{_OCI}.config.v1+json", blobs[1]),
        "layers": [_descriptor(f"{_OCI}.layer.v1.tar", layer)],
    }
    blobs.append(_json(manifest))
    names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    entry = {
        **_descriptor(manifest["mediaType"], blobs[2]),
        "platform": {"architecture": "amd64", "os": "linux"},
        "annotations": names,
    }
    files = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json({"schemaVersion": 2, "manifests": [entry]}),
    }
    files |= {f"blobs/sha256/{_digest(blob).removeprefix('sha256:')}": blob for blob in blobs}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, content in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _descriptor(media_type: Any, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
