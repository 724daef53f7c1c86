"""A stand-in for the GPU driver's library, so that what links with it can be made on a machine without a GPU.

What is linked only names `libcuda.so.1`; where it runs, the loader finds the real one.

Called by `build`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import triton

NAME = "libcuda.so.1"


@contextlib.contextmanager
def stand_in_driver(folder: Path) -> Iterator[None]:
    """Make Triton link with an empty library in `folder`, and load what it links without the driver's functions.

    Raises:
        CalledProcessError, FileNotFoundError: there is no C compiler, or it failed.
    """
    source, library = folder / "empty.c", folder / NAME
    source.write_text("")
    compiler = os.environ.get("CC", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", library, source], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)  # functions of the driver are looked up when they are called
    try:
        with triton.knobs.nvidia.scope():
            triton.knobs.nvidia.libcuda_path = str(folder)
            yield
    finally:
        sys.setdlopenflags(flags)
