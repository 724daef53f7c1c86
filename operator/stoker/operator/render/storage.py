"""The place of checkpoints inside a pod: a folder below the mount of a claim.

Pure. Called by the renderings of trainer, engine and task pods.
"""

from __future__ import annotations

from stoker.operator.api.storage import StorageSpec
from stoker.operator.render.pod import CHECKPOINT_FOLDER


def storage_root(storage: StorageSpec, default_path: str, mount: str = CHECKPOINT_FOLDER) -> str:
    """Return the folder with the `step-...` folders, as the pod sees it."""
    return f"{mount}/{storage.path or default_path}"
