"""A stand-in for the GPU driver's library, so that what links with it can be made on a machine without a GPU.

What is linked only names `libcuda.so.1`; where it runs, the loader finds the real one.

Called by `build`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton

NAME = "libcuda.so.1"


@contextlib.contextmanager
def stand_in_driver() -> Iterator[None]:
    """Make Triton link with an empty library, and load what it links without the driver's functions.

    Raises:
        CalledProcessError, FileNotFoundError: there is no C compiler, or it failed.
    """
    folder = empty_library()
    ctypes.CDLL(str(Path(folder, NAME)), mode=ctypes.RTLD_GLOBAL)
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)  # functions of the driver are looked up when they are called
    try:
        with triton.knobs.nvidia.scope():
            triton.knobs.nvidia.libcuda_path = folder
            yield
    finally:
        sys.setdlopenflags(flags)


@functools.cache
def empty_library() -> str:
    """The folder of an empty library, made once: Triton asks for the folder once in a process."""
    folder = tempfile.TemporaryDirectory(prefix="stoker-driver-")
    atexit.register(folder.cleanup)
    source, library = Path(folder.name, "empty.c"), Path(folder.name, NAME)
    source.write_text("")
    compiler = os.environ.get("CC", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", library, source], check=True)
    return folder.name
