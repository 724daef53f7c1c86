"""A driver for a GPU that is not there: Triton compiles for its architecture, and launches do nothing.

The compiled libraries of Triton's own driver, which start kernels, are made too: they need a C compiler at the first
call otherwise.

Made by `build`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
"""Most shared memory of a program, by architecture: CUDA's programming guide, `technical specifications`."""
THREADS = 1024
WARP = 32


class AbsentGpu:
    """What Triton asks a driver for."""

    def __init__(self, architecture: int) -> None:
        """Raises ValueError for an architecture that is not known."""
        if architecture not in SHARED_BYTES:
            known = ", ".join(map(str, SHARED_BYTES))
            raise ValueError(f"architecture must be one of {known}, got {architecture}")
        self.target = GPUTarget("cuda", architecture, WARP)
        self.utils = AbsentUtils(SHARED_BYTES[architecture])

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        """A name of its own: what is compiled here is not taken for a kernel of a real device."""
        return f"absent sm_{self.target.arch}"

    def get_current_stream(self, _device: str) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """Make what starts this kernel, which older Triton compiles by a C compiler, and return what does not."""
        _ = self.utils.real  # makes the driver's library
        CudaLauncher(src, metadata)
        return lambda *_: None


@contextlib.contextmanager
def absent_gpu(architecture: int) -> Iterator[None]:
    """Launch on such a GPU inside. Raises ValueError for an unknown architecture, or where kernels are interpreted."""
    if triton.knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET must not be set: interpreted kernels cannot be compiled")
    triton.runtime.driver.set_active(AbsentGpu(architecture))
    try:
        yield
    finally:
        triton.runtime.driver.set_active(None)  # the next call looks for a GPU again


class AbsentUtils:
    """Triton's utilities of the driver, except what calls it."""

    def __init__(self, shared_bytes: int) -> None:
        self._shared_bytes = shared_bytes

    @functools.cached_property
    def real(self) -> CudaUtils:
        """Triton's own, which it compiles by a C compiler."""
        return CudaUtils()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def get_device_properties(self, _device: str) -> dict[str, int]:
        return {"max_shared_mem": self._shared_bytes}

    def load_binary(self, *_: Any) -> tuple[None, None, int, int, int]:
        """Module, function, registers, spills, most threads."""
        return None, None, 0, 0, THREADS

    def unload_module(self, _module: None) -> None:
        pass
