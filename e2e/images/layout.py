"""An OCI layout on disk, and the part of an image in it that a content store does not have yet, as one tar stream."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

REF_NAME = "org.opencontainers.image.ref.name"
IMAGE_NAME = "io.containerd.image.name"
COPY_BYTES = 1 << 22


class Layout:
    """A folder of blobs named by their digest, as `buildah push oci:FOLDER:REF` writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def manifest(self, ref: str) -> dict[str, Any]:
        """The descriptor of one image's manifest.

        Raises:
            KeyError: the layout does not hold it.
        """
        index = json.loads((self.folder / "index.json").read_text())
        for descriptor in index["manifests"]:
            if descriptor.get("annotations", {}).get(REF_NAME) == ref:
                return dict(descriptor)
        raise KeyError(ref)

    def digests(self, descriptor: dict[str, Any]) -> list[str]:
        """Everything that an image consists of: manifest, configuration, layers."""
        manifest = json.loads(self.blob(descriptor["digest"]).read_text())
        parts = [manifest["config"], *manifest["layers"]]
        return list(dict.fromkeys([descriptor["digest"], *(part["digest"] for part in parts)]))

    def prune(self) -> None:
        """Drops the blobs of images that were replaced."""
        index = json.loads((self.folder / "index.json").read_text())
        kept = {digest for descriptor in index["manifests"] for digest in self.digests(descriptor)}
        for blob in (self.folder / "blobs" / "sha256").iterdir():
            if f"sha256:{blob.name}" not in kept:
                blob.unlink()

    def blob(self, digest: str) -> Path:
        return blob_path(self.folder, digest)

    def write(self, stream: IO[bytes], name: str, descriptor: dict[str, Any], digests: Iterable[str]) -> None:
        """An archive that `ctr images import` takes: the image under `name`, and of its blobs only `digests`."""
        entry = {**descriptor, "annotations": {IMAGE_NAME: name, REF_NAME: name.rpartition(":")[2]}}
        index = {"schemaVersion": 2, "manifests": [entry]}
        with tarfile.open(fileobj=stream, mode="w|", bufsize=COPY_BYTES) as archive:
            _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
            for digest in digests:
                archive.add(self.blob(digest), f"blobs/{digest.replace(':', '/')}")
            _add(archive, "index.json", json.dumps(index).encode())


def blob_path(folder: Path, digest: str) -> Path:
    """Where a layout, or a content store of containerd, keeps a blob."""
    return folder / "blobs" / digest.replace(":", "/")


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))
