"""Calls of the CUDA driver and of NVML that PyTorch does not offer: plain allocations, IPC handles, batches of copies.

Through ctypes on libraries that every NVIDIA driver brings, whatever version of CUDA PyTorch was built for. A call
lets other Python threads run. No memory is owned here; `cuda_memory` does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

from stoker.engine.transfer.device_memory import CellCopy, Copy, DeviceError

HANDLE_BYTES = 64
MOST_NVLINKS = 18
_LAZY_PEER_ACCESS = 1
_ORDER_OF_STREAM = 1
_UNIFIED_MEMORY = 4


class _Handle(ctypes.Structure):
    _fields_ = (("data", c_ubyte * HANDLE_BYTES),)


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: order of access to the source, hints of location, flags."""

    _fields_ = (("order", c_int), ("source", c_int * 2), ("target", c_int * 2), ("flags", c_uint))


class _Corner(ctypes.Structure):
    """Half of CUDA_MEMCPY3D: where a box of bytes begins in memory, and how its rows and planes lie."""

    _fields_ = (
        ("x_bytes", c_size_t), ("y", c_size_t), ("z", c_size_t), ("level", c_size_t), ("memory_type", c_uint),
        ("host", c_void_p), ("device", c_uint64), ("array", c_void_p), ("reserved", c_void_p), ("pitch", c_size_t),
        ("height", c_size_t),
    )  # fmt: skip


class _BoxCopy(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        ("source", _Corner), ("target", _Corner), ("width", c_size_t), ("height", c_size_t), ("depth", c_size_t),
    )  # fmt: skip


class CudaDriver:
    """Calls with errors as exceptions. The context is the calling thread's (`enter`)."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError(f"the CUDA driver cannot be loaded: {error}") from error
        self.batch = next(
            (name for name in ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync") if hasattr(self._library, name)), None
        )
        """The call that posts many copies at once; None: they are posted one by one."""

    def open_device(self, number: int) -> None:
        """Make the context of a device that PyTorch will use, too. It lasts as long as the process."""
        device, context = c_int(), c_void_p()
        self._call("cuInit", c_uint(0))
        self._call("cuDeviceGet", byref(device), c_int(number))
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)

    def context(self) -> int:
        """The context of this thread, which PyTorch has made."""
        found = c_void_p()
        self._call("cuCtxGetCurrent", byref(found))
        if not found.value:
            raise DeviceError("cuCtxGetCurrent: this thread has no context")
        return found.value

    def enter(self, context: int) -> None:
        """Make a context that of this thread."""
        self._call("cuCtxSetCurrent", c_void_p(context))

    def allocate(self, num_bytes: int) -> int:
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(num_bytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", c_uint64(address))

    def export(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle.data)

    def open(self, handle: bytes) -> int:
        if len(handle) != HANDLE_BYTES:
            raise DeviceError(f"a handle has {HANDLE_BYTES} bytes, got {len(handle)}")
        address = c_uint64()
        opened = _Handle((c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
        self._call("cuIpcOpenMemHandle_v2", byref(address), opened, c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", c_uint64(address))

    def pin(self, address: int, num_bytes: int) -> None:
        self._call("cuMemHostRegister_v2", c_void_p(address), c_size_t(num_bytes), c_uint(0))

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", c_void_p(address))

    def copy(self, copies: Sequence[Copy], stream: int) -> None:
        """Post copies to a stream, by one call where the driver has it. The kinds of memory are found by address."""
        if self.batch is not None and len(copies) > 1 and stream:
            self._copy_batch(self.batch, copies, stream)
            return
        for source, target, num_bytes in copies:
            arguments = c_uint64(target), c_uint64(source), c_size_t(num_bytes), c_void_p(stream)
            self._call("cuMemcpyAsync", *arguments)

    def _copy_batch(self, name: str, copies: Sequence[Copy], stream: int) -> None:
        count = len(copies)
        from_N, to_N, bytes_N = zip(*copies, strict=True)
        sources, targets = (c_uint64 * count)(*from_N), (c_uint64 * count)(*to_N)
        sizes = (c_size_t * count)(*bytes_N)
        attributes, first = _CopyAttributes(order=_ORDER_OF_STREAM), (c_size_t * 1)(0)
        failed = c_size_t(0)
        which = () if name.endswith("_v2") else (byref(failed),)
        self._call(
            name, targets, sources, sizes, c_size_t(count), byref(attributes), first, c_size_t(1), *which,
            c_void_p(stream),
        )  # fmt: skip

    def copy_cells(self, cells: Sequence[CellCopy], stream: int) -> None:
        """Post copies of cells to a stream."""
        for cell in cells:
            row_pitch = cell.row_pitch or cell.row_bytes
            source_rows = cell.plane_pitch // row_pitch or cell.rows
            target_rows = cell.target_pitch // cell.row_bytes or cell.rows
            box = _BoxCopy(
                _Corner(memory_type=_UNIFIED_MEMORY, device=cell.source, pitch=row_pitch, height=source_rows),
                _Corner(memory_type=_UNIFIED_MEMORY, device=cell.target, pitch=cell.row_bytes, height=target_rows),
                cell.row_bytes, cell.rows, cell.planes,
            )  # fmt: skip
            self._call("cuMemcpy3DAsync_v2", byref(box), c_void_p(stream))

    def bus_id(self) -> bytes:
        """Of the current context's device on the PCI bus, as NVML names it."""
        device, text = c_int(), ctypes.create_string_buffer(32)
        self._call("cuCtxGetDevice", byref(device))
        self._call("cuDeviceGetPCIBusId", text, c_int(len(text)), device)
        return text.value

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DeviceError(f"{name}: this driver does not have it")
        code = function(*arguments)
        if code:
            word = c_char_p()
            self._library.cuGetErrorName(c_int(code), byref(word))
            raise DeviceError(f"{name}: {(word.value or b'error').decode()} ({code})")


def active_nvlinks(bus_id: bytes) -> int:
    """NVLinks of a device that are up; 0 also where NVML is missing."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if library.nvmlInit_v2():
        return 0
    try:
        device = c_void_p()
        if library.nvmlDeviceGetHandleByPciBusId_v2(c_char_p(bus_id), byref(device)):
            return 0
        return sum(_is_up(library, device, link) for link in range(MOST_NVLINKS))
    finally:
        library.nvmlShutdown()


def _is_up(library: ctypes.CDLL, device: c_void_p, link: int) -> bool:
    state = c_uint()
    return library.nvmlDeviceGetNvLinkState(device, c_uint(link), byref(state)) == 0 and state.value == 1
