"""Rendering of task pods: `python -m stoker.checkpoint task ...` on the claim or bucket with the checkpoints.

They need no torch, and their result is the termination message.

Pure; called by the reconcilers of Checkpoint and TrainingJob.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.operator.api.pod_fields import SmallPod
from stoker.operator.api.storage import StorageSpec
from stoker.operator.domain.plan import Object
from stoker.operator.domain.settings import Settings
from stoker.operator.render.pod import (
    TERMINATION_LOG,
    PodProgram,
    claim_volume,
    metadata_of,
    render_pod,
    scratch_volume,
)
from stoker.operator.render.storage import bucket_mounts, storage_root


def task_pod(
    owner: Object,
    name: str,
    verb: str,
    arguments: tuple[str, ...],
    *,
    storage: StorageSpec,
    default_path: str = "",
    fields: SmallPod,
    labels: Mapping[str, str],
    settings: Settings,
) -> Object:
    """Render one task; `verb` is verify, inspect, import, delete or list, and only delete may write."""
    buckets = bucket_mounts((storage, default_path))
    pairs = [scratch_volume("stoker-tmp", "/tmp"), *buckets.volumes]
    if storage.claim_name is not None:
        pairs.insert(0, claim_volume(storage.claim_name, read_only=verb != "delete"))
    program = PodProgram(
        image=fields.image or settings.control_image,
        command=[
            *settings.python,
            "-m",
            "stoker.checkpoint",
            "task",
            verb,
            *arguments,
            "--termination-log",
            TERMINATION_LOG,
        ],
        volumes=[volume for volume, _ in pairs],
        mounts=[mount for _, mount in pairs],
        env=buckets.env,
        deadline_s=settings.task_deadline_s,
        resources=settings.task_resources,
    )
    return render_pod(metadata_of(owner, name, "task", {**labels, "task": verb}), program, fields, settings)


def folder_arguments(storage: StorageSpec, default_path: str, folder: str, digest: str | None) -> tuple[str, ...]:
    """Return `--folder PATH [--digest D]` for one checkpoint."""
    path = f"{storage_root(storage, default_path)}/{folder}"
    return ("--folder", path, *(("--digest", digest) if digest else ()))


def list_arguments(storage: StorageSpec, default_path: str, writer: str, after_step: int | None) -> tuple[str, ...]:
    """Return `--root PATH --writer W [--after-step N]` for the saves of one attempt."""
    after = () if after_step is None else ("--after-step", str(after_step))
    return ("--root", storage_root(storage, default_path), "--writer", writer, *after)
