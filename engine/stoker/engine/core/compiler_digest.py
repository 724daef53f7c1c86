"""What Triton computes once in a process, done in a thread while it still imports PyTorch. No torch.

The digest of Triton's own files is part of the key of every kernel in a cache: some 500 MB are read when the first
kernel is asked for, while all else waits. With it goes the search for the driver's library. Triton keeps both. What
fails here fails again where a kernel is asked for, and is told there.

Called once by `main`.
"""

from __future__ import annotations

from contextlib import suppress
from subprocess import SubprocessError
from threading import Thread


def digest_compiler_beside(device: str) -> Thread | None:
    """Begin to compute the digest; None where the process computes on the CPU, or Triton is not installed."""
    if device == "cpu":
        return None
    try:
        from triton.backends.nvidia.driver import libcuda_dirs
        from triton.runtime.cache import triton_key
    except ImportError:
        return None

    def compute() -> None:
        triton_key()
        with suppress(AssertionError, OSError, SubprocessError):  # no driver
            libcuda_dirs()

    thread = Thread(target=compute, name="digest-compiler", daemon=True)
    thread.start()
    return thread
