"""Triton's cache in two layers: the shipped kernels, which are only read, then the user's own folder.

The shipped layer is looked up first and writes nothing, so it works where no folder can be written. What neither has is
compiled, and kept in the user's (`TRITON_CACHE_DIR`).

`use_shipped_kernels` is called once by a process, before its first kernel.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import triton
from triton.runtime.cache import CacheManager, FileCacheManager

from stoker.model.kernels.ahead.manifest import default_folder, find_folder, obstacle, read_manifest

log = logging.getLogger("stoker.model")

GROUP = "__grp__"
"""Prefix of the file in which Triton lists the files of one kernel."""
DRIVER_LIBRARY = "cuda_utils."
"""First part of the name of the driver's library. Newer Triton puts the folder of the GPU's driver into its key, which
the machine that compiled it cannot know; within one Triton version the source is the same."""


@dataclass
class KernelLookups:
    """What a process has looked up so far, by name. Each is looked up once."""

    shipped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Found in the user's cache."""
    compiled: list[str] = field(default_factory=list)
    """In neither."""

    def describe(self) -> str:
        missing = f" ({', '.join(sorted(set(self.compiled)))})" if self.compiled else ""
        return f"{len(self.shipped)} shipped, {len(self.kept)} of the cache, {len(self.compiled)} compiled{missing}"


def use_shipped_kernels(
    environment: Mapping[str, str], architecture: int, default: Path | None = None
) -> KernelLookups | None:
    """Look kernels up in the shipped folder from now on; None where there is none that this process can use.

    `architecture`: of this process's GPU, 90 for sm_90. `default`: the installation's folder.

    Raises:
        ValueError: the folder that the environment names has no readable manifest.
    """
    folder = find_folder(environment, default_folder() if default is None else default)
    if folder is None:
        return None
    problem = obstacle(read_manifest(folder), triton.__version__, architecture)
    if problem is not None:
        log.warning("the kernels in %s are not used: %s; kernels are compiled at their first call", folder, problem)
        return None
    lookups = KernelLookups()
    triton.knobs.cache.manager_class = partial(open_cache, folder, lookups)
    return lookups


def open_cache(
    folder: Path, lookups: KernelLookups, key: str, *, override: bool = False, dump: bool = False
) -> CacheManager:
    """The manager of one key. Triton's folders for dumps and overrides have one layer."""
    if override or dump:
        return FileCacheManager(key, override=override, dump=dump)
    return LayeredCache(folder, lookups, key)


class LayeredCache(CacheManager):  # type: ignore[misc]
    """The files of one key, which is a kernel or a library of the driver."""

    def __init__(self, folder: Path, lookups: KernelLookups, key: str) -> None:
        self.folder, self.lookups, self.key = folder, lookups, key
        self._own: FileCacheManager | None = None

    @property
    def own(self) -> FileCacheManager:
        """The user's layer, whose folder is made at its first use."""
        if self._own is None:
            self._own = FileCacheManager(self.key)
        return self._own

    def get_file(self, filename: str) -> str | None:
        if Path(triton.knobs.cache.dir, self.key, filename).exists():  # made here, where the shipped one did not load
            self.lookups.kept.append(filename)
            return str(self.own.get_file(filename))
        shipped = self.folder / self.key / filename
        if filename.startswith(DRIVER_LIBRARY) and not shipped.exists():
            shipped = self.folder / filename
        if shipped.exists():
            self.lookups.shipped.append(filename)
            return str(shipped)
        kept: str | None = self.own.get_file(filename)
        self.note(filename, kept is not None)
        return kept

    def get_group(self, filename: str) -> dict[str, str] | None:
        shipped = shipped_group(self.folder / self.key, filename)
        if shipped is not None:
            self.lookups.shipped.append(filename)
            return shipped
        kept: dict[str, str] | None = self.own.get_group(filename)
        self.note(filename, bool(kept))
        return kept

    def note(self, filename: str, is_kept: bool) -> None:
        if is_kept:
            self.lookups.kept.append(filename)
            return
        self.lookups.compiled.append(filename)
        log.info("%s is not among the shipped kernels, so it is compiled", filename)

    def put(self, data: str | bytes, filename: str, binary: bool = True) -> str:
        return str(self.own.put(data, filename, binary))

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        return str(self.own.put_group(filename, group))


def shipped_group(folder: Path, filename: str) -> dict[str, str] | None:
    """The files of a shipped kernel; None unless all are there. The list of names is Triton's, its folders are not."""
    listed = folder / f"{GROUP}{filename}"
    if not listed.exists():
        return None
    files = {name: folder / name for name in json.loads(listed.read_text())["child_paths"]}
    return {name: str(file) for name, file in files.items()} if all(map(Path.exists, files.values())) else None
