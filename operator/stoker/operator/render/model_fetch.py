"""What a pod needs to fetch a model: the node's cache, and the Secret with the access to its source.

Pure. Called by the renderings of engines and trainers.
"""

from __future__ import annotations

from typing import Any

from stoker.operator.domain.settings import Settings
from stoker.operator.render.pod import WORK_FOLDER, scratch_volume

MODEL_CACHE_FOLDER = "/var/stoker/models"
ACCESS_FOLDER = "/var/stoker/model-access"
ACCESS_VARIABLE = "STOKER_MODEL_ACCESS"
_CACHE = "stoker-models"
_ACCESS = "stoker-model-access"

Mounted = tuple[dict[str, Any], dict[str, Any]]


def fetch_volumes(fetches: bool, secret: str | None, settings: Settings) -> list[Mounted]:
    """Render the cache (the node's folder, or one of the pod's own) and the Secret, with their mounts."""
    found = [_cache_volume(settings)] if fetches else []
    if secret is not None:
        mount = {"name": _ACCESS, "mountPath": ACCESS_FOLDER, "readOnly": True}
        found.append(({"name": _ACCESS, "secret": {"secretName": secret}}, mount))
    return found


def fetch_variables(fetches: bool, secret: str | None) -> dict[str, str]:
    """Return the variables that name the mounted Secret, and what the hub's client needs: a folder that it may
    write to, and patience (seconds) with a silent server."""
    access = {ACCESS_VARIABLE: ACCESS_FOLDER} if secret is not None else {}
    hub = {"HF_HOME": f"{WORK_FOLDER}/huggingface", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    return {**hub, **access} if fetches else access


def _cache_volume(settings: Settings) -> Mounted:
    if not settings.model_cache_path:
        return scratch_volume(_CACHE, MODEL_CACHE_FOLDER)
    host = {"path": settings.model_cache_path, "type": "Directory"}
    return {"name": _CACHE, "hostPath": host}, {"name": _CACHE, "mountPath": MODEL_CACHE_FOLDER}
