"""The model of an engine on this machine: where its path is a URI, it is fetched into the cache first.

Called once, before anything opens the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from stoker.checkpoint.remote.model_uri import is_model_uri
from stoker.engine.config import EngineConfig

Progress = Callable[[str], None]
REPORT_S = 0.5


def with_fetched_model(config: EngineConfig, progress: Progress = lambda _: None) -> tuple[EngineConfig, str | None]:
    """Return the configuration with a local path, and the digest of what its source has under the URI.

    Raises:
        ValueError: the URI is wrong, or the model is missing or damaged (CheckpointError).
        OSError: the source cannot be reached or refuses access, or the disk is full.
    """
    model = config.model
    if not is_model_uri(model.path):
        return config, None
    from stoker.checkpoint.remote.model_cache import fetch_model  # imports clients of hubs and registries

    progress("FetchingModel")
    last_s = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= REPORT_S or done == total:
            last_s = time.monotonic()
            progress(f"FetchingModel {100 * done // max(total, 1)} %")

    found = fetch_model(model.path, Path(model.cache) if model.cache else None, progress=report)
    local = model.model_copy(update={"path": str(found.path)})
    return config.model_copy(update={"model": local}), found.digest
