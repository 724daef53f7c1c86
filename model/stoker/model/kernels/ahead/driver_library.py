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
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.backends.nvidia import driver as nvidia_driver

NAME = "libcuda.so.1"
SOURCES = ("driver.c", "driver.py")


@contextlib.contextmanager
def stand_in_driver() -> Iterator[None]:
    """Make Triton link with a library whose functions do nothing, and load what it links.

    Raises:
        CalledProcessError, FileNotFoundError: there is no C compiler, or it failed.
    """
    folder = idle_library()
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
def idle_library() -> str:
    """The folder of a library whose functions do nothing, made once: Triton asks for the folder once in a process."""
    folder = tempfile.TemporaryDirectory(prefix="stoker-driver-")
    atexit.register(folder.cleanup)
    source, library = Path(folder.name, "driver.c"), Path(folder.name, NAME)
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in sorted(driver_functions())))
    compiler = os.environ.get("CC", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", library, source], check=True)
    return folder.name


def driver_functions() -> set[str]:
    """Names of the driver's functions in the sources of what Triton compiles; a few more names do no harm.

    A linker may leave out a library that defines nothing that is used, and what it makes then fails where it runs.
    """
    folder = Path(nvidia_driver.__file__).parent
    return set(re.findall(r"\bcu[A-Z]\w*", "".join((folder / name).read_text() for name in SOURCES)))
