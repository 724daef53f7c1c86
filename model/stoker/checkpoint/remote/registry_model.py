"""A model in a registry of OCI images: a manifest whose layers are the model's files, each with its name.

The name of a layer is its annotation `org.opencontainers.image.title`, as `oras push` writes it, or
`org.cncf.model.filepath` of the model specification. Layers that are archives are refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError
from stoker.checkpoint.remote.listing import (
    MAX_FILES,
    Environment,
    Listing,
    RemoteFile,
    append_to,
    checked_name,
)
from stoker.checkpoint.remote.model_uri import ModelUri
from stoker.checkpoint.remote.registry_client import RegistryClient

NAMES = ("org.opencontainers.image.title", "org.cncf.model.filepath")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class RegistryModel:
    """One tag or digest of a repository."""

    def __init__(self, uri: ModelUri, environment: Environment) -> None:
        """Make the client; nothing is sent."""
        self.uri = uri
        registry, _, repository = uri.place.partition("/")
        self._client = RegistryClient(registry, repository, environment)

    def listing(self) -> Listing:
        digest, manifest = self._client.manifest(self.uri.revision)
        layers = manifest.get("layers")
        if not isinstance(layers, list) or not 0 < len(layers) <= MAX_FILES:
            raise CheckpointError(f"{self.uri}: the manifest lists no files (an index of platforms is not a model)")
        return Listing(digest, tuple(self._file(layer) for layer in layers))

    def fetch(self, file: RemoteFile, target: Path) -> None:
        append_to(target, lambda offset: self._client.blob(file.key, offset, file.bytes))

    def check(self, folder: Path) -> None:
        """Each file is a blob with its own digest."""

    def close(self) -> None:
        self._client.close()

    def _file(self, layer: Any) -> RemoteFile:
        try:
            annotations = layer.get("annotations") or {}
            name = next((annotations[key] for key in NAMES if key in annotations), None)
            digest, size, media = str(layer["digest"]), int(layer["size"]), str(layer.get("mediaType", ""))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(f"{self.uri}: a layer of the manifest is not valid") from error
        found = _DIGEST.fullmatch(digest)
        if found is None:
            raise CheckpointCorrupt(f"{self.uri}: the digest {digest!r} of a layer is not of the form sha256:...")
        if name is None or "tar" in media.split("/")[-1]:
            text = f"{self.uri}: layer {digest[:19]} ({media}) is an archive or has no name"
            raise CheckpointError(f"{text}; a model has one layer per file, named by {NAMES[0]}")
        return RemoteFile(checked_name(name, str(self.uri)), size, sha256=found[1], key=digest, version=found[1])
