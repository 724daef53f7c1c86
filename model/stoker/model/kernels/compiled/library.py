"""The C kernels as a loaded library: compiled once per sources, compiler and processor, and kept in the user's cache.

Called by `compiled.kernels` when it is imported, and by `kernel_set` to find out why it cannot be.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

log = logging.getLogger("stoker.model")

FOLDER = Path(__file__).parent
SOURCE_NAMES = ("rows", "products", "tile_products", "vector_products", "prompt_attention", "blocks")
SOURCES = tuple(FOLDER / f"{name}.c" for name in SOURCE_NAMES)
HEADERS = tuple(FOLDER / f"{name}.h" for name in ("bfloat16", "rows", "products"))
FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-fopenmp", "-shared", "-fPIC"),
    # Sums may be reordered, so that they become vectors. Infinities and NaN keep their meaning.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)
WIDE_VECTORS = "-mprefer-vector-width=512"
COMPILE_TIMEOUT_S = 120.0

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
RETURN_INT = (
    "stoker_product_kind",
    "stoker_product",
    "stoker_norm_product",
    "stoker_norm_product_swiglu",
    "stoker_blocks",
)
SIGNATURES: dict[str, list[Any]] = {
    "stoker_product_kind": [],
    "stoker_rms_norm": [_POINTER] * 2 + [_FLOAT, _POINTER] + [_LONG] * 2,
    "stoker_add_rms_norm": [_POINTER] * 3 + [_FLOAT] + [_POINTER] * 2 + [_LONG] * 2,
    "stoker_swiglu": [_POINTER] * 2 + [_LONG] * 2,
    "stoker_rotate_and_write": (
        [_POINTER] * 3 + [_LONG] + [_POINTER] * 2 + [_LONG] + [_POINTER] * 2 + [_FLOAT] + [_POINTER] * 3 + [_LONG] * 4
    ),
    "stoker_product": [_POINTER] * 4 + [_LONG] * 3,
    "stoker_norm_product": [_POINTER] * 3 + [_FLOAT] + [_POINTER] * 4 + [_LONG] * 3,
    "stoker_norm_product_swiglu": [_POINTER] * 3 + [_FLOAT] + [_POINTER] * 3 + [_LONG] * 3,
    "stoker_blocks": [_POINTER] * 2,
    "stoker_attend_prompt": [_POINTER] * 4 + [_LONG] * 7 + [_FLOAT, _LONG],
    "stoker_attend": [_POINTER] * 6 + [_LONG] * 6 + [_FLOAT, _LONG],
}


class CompileError(RuntimeError):
    """The kernels cannot be compiled here; the message says why."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """Return the library, compiled if this machine has none of this source yet. torch is imported before: both then
    share one pool of threads.

    Raises:
        CompileError: there is no C compiler, it fails, or its result cannot be loaded.
    """
    file = compiled_file(cache_folder(), os.environ.get("CC", "cc"))
    try:
        library = ctypes.CDLL(str(file))
    except OSError as error:
        raise CompileError(f"the C kernels cannot be loaded: {error}") from error
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int if name in RETURN_INT else None
    return library


def cache_folder() -> Path:
    return Path(os.environ.get("STOKER_CACHE", Path.home() / ".cache/stoker")) / "compiled"


def compiled_file(folder: Path, compiler: str) -> Path:
    """Return the compiled library in `folder`. Processes that compile at the same time replace each other's equal
    file.

    Raises:
        CompileError: as `load_library`.
    """
    program = shutil.which(compiler)
    if program is None:
        raise CompileError(f"there is no C compiler {compiler!r}; install one, or name it in CC")
    command = (program, *FLAGS, *((WIDE_VECTORS,) if platform.machine() == "x86_64" else ()))
    target = folder / f"kernels-{key_of(command)}.so"
    if not target.exists():
        log.info("compiling the C kernels for this processor, once, into %s", target)
        try:
            compile_into(target, command)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"the C kernels cannot be compiled: {error}") from error
    return target


def key_of(command: tuple[str, ...]) -> str:
    """A name for the result: it depends on the source, the compiler and what `-march=native` stands for."""
    compiler = Path(command[0]).resolve().stat()
    texts = (file.read_text() for file in (*SOURCES, *HEADERS))
    parts = (*texts, *command, compiler.st_size, compiler.st_mtime_ns, processor())
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=12).hexdigest()


def processor() -> str:
    """What the kernel says about the processor's instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def compile_into(target: Path, command: tuple[str, ...]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        result = Path(folder) / target.name
        ended = subprocess.run(
            [*command, "-o", str(result), *map(str, SOURCES), "-lm"],
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
        if ended.returncode:
            lines = ended.stderr.strip().splitlines() or ["no message"]
            raise CompileError(f"{command[0]} ended with {ended.returncode}: {lines[0]}")
        result.replace(target)
