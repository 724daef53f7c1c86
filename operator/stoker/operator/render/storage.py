"""The place of checkpoints inside a pod: a folder below the mount of a claim, or `s3://BUCKET/PREFIX`.

A bucket's endpoint and region reach the pod as `STOKER_BUCKETS` (`stoker.checkpoint.bucket_access`), its credentials as
a mounted Secret: they are in no argument, no configuration and no log.

Pure. Called by the renderings of trainer, engine and task pods.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.operator.api.storage import ObjectStore, StorageSpec
from stoker.operator.render.pod import CHECKPOINT_FOLDER

BUCKETS_FOLDER = "/var/stoker/buckets"
BUCKETS_VARIABLE = "STOKER_BUCKETS"

Mounted = tuple[dict[str, Any], dict[str, Any]]
"""A volume and its mount."""


@dataclass(frozen=True)
class BucketMounts:
    """What a pod needs to reach buckets."""

    volumes: Sequence[Mounted] = ()
    env: dict[str, str] = field(default_factory=dict)


def storage_root(storage: StorageSpec, default_path: str, mount: str = CHECKPOINT_FOLDER) -> str:
    """Return the folder with the `step-...` folders, as the pod sees it."""
    if storage.s3 is not None:
        return f"s3://{_place(storage.s3, default_path)}"
    return f"{mount}/{storage.path or default_path}"


def settled(storage: StorageSpec, default_path: str) -> StorageSpec:
    """Return a storage that names its folder itself."""
    if storage.s3 is not None:
        return storage.model_copy(
            update={"s3": storage.s3.model_copy(update={"prefix": storage.s3.prefix or default_path})}
        )
    return storage.model_copy(update={"path": storage.path or default_path})


def bucket_mounts(*storages: tuple[StorageSpec, str]) -> BucketMounts:
    """Render the access to the buckets among storages with their default paths; of a place that is named twice, the
    first counts."""
    sections: dict[str, dict[str, str]] = {}
    volumes: list[Mounted] = []
    for storage, default_path in storages:
        place = _place(storage.s3, default_path) if storage.s3 else None
        if storage.s3 is None or place is None or place in sections:
            continue
        sections[place] = dict(_settings(storage.s3))
        if storage.s3.credentials_secret_ref is not None:
            name = f"stoker-bucket-{len(volumes)}"
            folder = f"{BUCKETS_FOLDER}/{len(volumes)}"
            sections[place]["credentials"] = folder
            secret = {"name": name, "secret": {"secretName": storage.s3.credentials_secret_ref.name}}
            volumes.append((secret, {"name": name, "mountPath": folder, "readOnly": True}))
    env = {BUCKETS_VARIABLE: json.dumps(sections, sort_keys=True)} if sections else {}
    return BucketMounts(volumes, env)


def _settings(bucket: ObjectStore) -> Iterator[tuple[str, str]]:
    if bucket.endpoint:
        yield "endpoint", bucket.endpoint
    if bucket.region:
        yield "region", bucket.region


def _place(bucket: ObjectStore, default_path: str) -> str:
    return "/".join(part for part in (bucket.bucket, bucket.prefix or default_path) if part)
