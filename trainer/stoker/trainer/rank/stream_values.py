"""Numbers that a CUDA stream writes into memory, and waits for, in its order of work: no kernel, no multiprocessor.

Calls of the driver that PyTorch offers in part only, through ctypes (CUDA driver API, stream memory operations).
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint, c_uint32, c_uint64, c_void_p

AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ, of numbers that begin anew behind 2^32."""
FENCED = 0
"""CU_STREAM_WRITE_VALUE_DEFAULT: all that the stream has written before is seen by whoever sees the number."""


class StreamValues:
    """The two calls."""

    def __init__(self) -> None:
        """Raises OSError where there is no driver, AttributeError where it is too old."""
        library = ctypes.CDLL("libcuda.so.1")
        self._write, self._wait = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
        for call in (self._write, self._wait):
            call.restype, call.argtypes = c_int, [c_void_p, c_uint64, c_uint32, c_uint]

    def write(self, stream: int, address: int, value: int) -> None:
        """Raises RuntimeError."""
        self._check("cuStreamWriteValue32", self._write(stream, address, value % 2**32, FENCED))

    def wait(self, stream: int, address: int, value: int) -> None:
        """What is queued later runs when the number has at least this value. Raises RuntimeError."""
        self._check("cuStreamWaitValue32", self._wait(stream, address, value % 2**32, AT_LEAST))

    @staticmethod
    def _check(name: str, result: int) -> None:
        if result:
            raise RuntimeError(f"{name}: error {result} of the CUDA driver")
