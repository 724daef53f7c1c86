"""A built image: its manifest and configuration, and the names that follow from them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

REF_NAME = "org.opencontainers.image.ref.name"
IMAGE_NAME = "io.containerd.image.name"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True)
class BuiltImage:
    """The two small documents of an OCI image, byte for byte; the layers stay in the builder's store."""

    name: str
    """The image's name with its tag, as pods write it."""
    manifest: bytes
    config: bytes

    @property
    def digest(self) -> str:
        """The digest under which a registry lists the image."""
        return digest_of(self.manifest)

    @property
    def layers(self) -> list[tuple[str, int]]:
        """The digest and size of each layer's archive, lowest first."""
        return [(layer["digest"], int(layer["size"])) for layer in json.loads(self.manifest)["layers"]]

    @property
    def diff_ids(self) -> list[str]:
        """The digest of each layer's uncompressed archive, lowest first."""
        return list(json.loads(self.config)["rootfs"]["diff_ids"])

    def settings(self) -> dict[str, Any]:
        """The image's settings for processes: user, environment, command."""
        return dict(json.loads(self.config)["config"])

    def archive(self) -> bytes:
        """Return the archive with which `ctr images import` names the image.

        All blobs are in the content store already.
        """
        named = {IMAGE_NAME: self.name, REF_NAME: self.name.rpartition(":")[2]}
        entry = {"mediaType": MANIFEST_TYPE, "digest": self.digest, "size": len(self.manifest), "annotations": named}
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
            _add(archive, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
        return file.getvalue()


def digest_of(data: bytes) -> str:
    """Return the digest in OCI's notation."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """Return containerd's name of each layer's snapshot (OCI image specification, layer ChainID)."""
    chain: list[str] = []
    for diff_id in diff_ids:
        chain.append(digest_of(f"{chain[-1]} {diff_id}".encode()) if chain else diff_id)
    return chain


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))
