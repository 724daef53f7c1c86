"""The images of the end-to-end run: changed ones are built and imported into the seed store."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster import binaries, tools
from e2e.images.builder import Builder
from e2e.images.commands import BuildError
from e2e.images.preflight import missing
from e2e.images.recipe import ALL, Recipe
from e2e.images.store import ImageStore


def build_images(recipes: Sequence[Recipe] = ALL) -> ImageStore:
    """Build and import every changed image.

    It takes minutes on a fresh machine, seconds after a change of code, two seconds without a change.

    Raises:
        BuildError: a build or an import failed, or this machine lacks something.
    """
    store = ImageStore.default()
    if lines := missing(store.folder):
        raise BuildError("\n".join(lines))
    builder = Builder(store.folder, uv_cache())
    with _one_at_a_time(store.folder / "build.lock"):
        shutil.rmtree(store.folder / "layout", ignore_errors=True)  # where stores of an earlier edition kept archives
        builder.clear()
        names = [builder.build(recipe) for recipe in recipes]
        builder.prune(ALL)
    store.load(names, builder, binaries.build([tools.CONTAINERD]))
    return store


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Lock the build, so that two runs on one machine do not make the same large layer twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def uv_cache() -> Path:
    """Return the folder in which `make setup` left the wheels."""
    return Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv")
