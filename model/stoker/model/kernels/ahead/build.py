"""Compile what a program launches into a folder, for one architecture.

Called by the programs that know what is launched, in a process of its own for each architecture: Triton keeps what is
compiled in the process too.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton

from stoker.model.kernels.ahead.absent_gpu import absent_gpu
from stoker.model.kernels.ahead.driver_library import stand_in_driver
from stoker.model.kernels.ahead.layered_cache import DRIVER_LIBRARY
from stoker.model.kernels.ahead.products import ShapesOnly


@dataclass
class CompiledKernels:
    """The kernels that were launched: Triton's keys and their names."""

    names: dict[str, str] = field(default_factory=dict)
    num_compiled: int = 0
    """Those that the folder did not have."""
    seconds: float = 0.0

    def note(self, *, src: Any, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        """Triton's listener."""
        self.names[metadata["hash"]] = src.name
        self.num_compiled += not cache_hit


@contextlib.contextmanager
def compiling_into(folder: Path, architecture: int) -> Iterator[CompiledKernels]:
    """Compile, into a folder, all that is launched on CPU tensors inside. Nothing is computed.

    Triton's settings are given back at the end.

    Raises:
        ValueError: the architecture is not known, or kernels are interpreted here.
        CalledProcessError, FileNotFoundError: there is no C compiler, or it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compiled, began_s = CompiledKernels(), time.monotonic()
    with settings(folder, compiled), stand_in_driver(), absent_gpu(architecture), ShapesOnly():  # type: ignore[no-untyped-call]
        yield compiled
    compiled.seconds = time.monotonic() - began_s
    lift_driver_library(folder)


@contextlib.contextmanager
def settings(folder: Path, compiled: CompiledKernels) -> Iterator[None]:
    """Keep binaries alone, in this folder alone."""
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(folder)
        triton.knobs.cache.manager_class = None
        triton.knobs.compilation.store_binary_only = True
        triton.knobs.compilation.listener = compiled.note
        yield


def lift_driver_library(folder: Path) -> None:
    """Put the driver's library where it is found by its name."""
    for file in folder.glob(f"*/{DRIVER_LIBRARY}*"):
        shutil.copy(file, folder / file.name)
