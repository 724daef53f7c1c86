"""The head of a GGUF file: metadata and where each tensor lies.

Foreign input, so every count is bounded before it is used.

The format is that of llama.cpp (version 2 and 3, little-endian): counts, key/value pairs, tensor descriptions, then
data. The gguf library reads it too, but makes several objects of each array element and believes every count.

Pure; called by `gguf_file`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quant_shape_to_byte_shape

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEAD_BYTES = 256 * 2**20
MAX_TENSORS = 20_000
MAX_KEYS = 4096
MAX_ELEMENTS = 2_000_000
"""Elements of all arrays: a vocabulary of 260,000 tokens with its types and merges has about 1,000,000."""
MAX_DIMS = 4
ALIGNMENT = 32
"""Alignment of the tensors' data, where `general.alignment` is missing."""
STRING, ARRAY = 8, 9
SCALARS: dict[int, struct.Struct] = {
    kind: struct.Struct("<" + letter)
    for kind, letter in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
"""Value type -> its form."""
PLAIN: dict[GGMLQuantizationType, type[np.generic]] = {
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F64: np.float64,
    GGMLQuantizationType.I8: np.int8,
    GGMLQuantizationType.I16: np.int16,
    GGMLQuantizationType.I32: np.int32,
    GGMLQuantizationType.I64: np.int64,
}
"""Types that numpy has; the others are bytes until they are dequantised."""


class HeadError(ValueError):
    """The head is damaged or exceeds a limit."""


class GgufTensor(NamedTuple):
    """A tensor that stays in the file."""

    name: str
    shape: tuple[int, ...]
    """Extents with the fastest first, as in the file."""
    tensor_type: GGMLQuantizationType
    data: npt.NDArray[Any]
    """Mapped; rows of bytes for a quantised type."""

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class GgufHead(NamedTuple):
    """The head of a file: its metadata and its tensors."""

    values: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_head(path: Path) -> GgufHead:
    """Read the head of a file and map its tensors.

    Raises:
        HeadError: it is no GGUF file, is damaged, or has more of anything than the limits allow.
    """
    if path.stat().st_size == 0:
        raise HeadError("the file is empty")
    mapped: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
    cursor = Cursor(mapped[:MAX_HEAD_BYTES].data)
    if bytes(cursor.take(4)) != MAGIC:
        raise HeadError("GGUF magic invalid")
    if (version := cursor.number("<I")) not in VERSIONS:
        raise HeadError(f"version {version}; allowed: {', '.join(map(str, VERSIONS))}, little-endian")
    num_tensors = cursor.count("<Q", "tensors", MAX_TENSORS)
    num_keys = cursor.count("<Q", "keys", MAX_KEYS)
    values = cursor.pairs(num_keys, cursor.value, "key")
    places = cursor.pairs(num_tensors, cursor.place, "tensor")
    data = mapped[aligned(cursor.offset, values.get("general.alignment", ALIGNMENT)) :]
    return GgufHead(values, {name: map_tensor(name, place, data) for name, place in places.items()})


class TensorEntry(NamedTuple):
    """A tensor as the head describes it."""

    shape: tuple[int, ...]
    tensor_type: int
    offset: int
    """Offset from the begin of the data."""


class Cursor:
    """Reads the head from front to back and never beyond its end."""

    def __init__(self, view: memoryview) -> None:
        self.view, self.offset, self.elements = view, 0, 0

    def take(self, num_bytes: int) -> memoryview:
        begin, self.offset = self.offset, self.offset + num_bytes
        if self.offset > len(self.view):
            raise HeadError(f"{num_bytes} bytes at {begin}, but the head ends at {len(self.view)}")
        return self.view[begin : self.offset]

    def number(self, form: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(value)

    def count(self, form: str, what: str, limit: int) -> int:
        if (value := self.number(form)) > limit:
            raise HeadError(f"{value} {what}; at most {limit} are allowed")
        return value

    def text(self) -> str:
        return str(self.take(self.number("<Q")), "utf-8")

    def pairs(self, count: int, read: Callable[[], Any], what: str) -> dict[str, Any]:
        """Read names that are all different, each with what `read` returns."""
        found: dict[str, Any] = {}
        for _ in range(count):
            name = self.text()
            if name in found:
                raise HeadError(f"{what} {name!r} appears twice")
            found[name] = read()
        return found

    def value(self) -> Any:
        """Read the type of a metadata value, then the value."""
        if (kind := self.number("<I")) == ARRAY:
            return self.array()
        return self.text() if kind == STRING else self.scalars(kind, 1)[0]

    def array(self) -> list[Any]:
        kind, length = self.number("<I"), self.number("<Q")
        self.elements += length
        if self.elements > MAX_ELEMENTS:
            raise HeadError(f"{self.elements} array elements; at most {MAX_ELEMENTS} are allowed")
        if kind == ARRAY:
            raise HeadError("not supported yet: arrays of arrays")
        return [self.text() for _ in range(length)] if kind == STRING else self.scalars(kind, length)

    def scalars(self, kind: int, length: int) -> list[Any]:
        if (form := SCALARS.get(kind)) is None:
            raise HeadError(f"unknown value type {kind}")
        return [value for (value,) in form.iter_unpack(self.take(form.size * length))]

    def place(self) -> TensorEntry:
        num_dims = self.count("<I", "dims", MAX_DIMS)
        shape = tuple(self.number("<Q") for _ in range(num_dims))
        return TensorEntry(shape, self.number("<I"), self.number("<Q"))


def aligned(offset: int, alignment: object) -> int:
    """Return the first multiple of `alignment` from `offset` on."""
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise HeadError(f"general.alignment {alignment!r} must be a power of two up to 2^20")
    return -(-offset // alignment) * alignment


def map_tensor(name: str, place: TensorEntry, data: npt.NDArray[np.uint8]) -> GgufTensor:
    """Return a tensor whose elements lie in `data`, the part of the file behind its head."""
    try:
        kind = GGMLQuantizationType(place.tensor_type)
    except ValueError as error:
        raise HeadError(f"tensor {name!r}: unknown type {place.tensor_type}") from error
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    num_bytes = math.prod(place.shape) * block_bytes // block_size
    if place.offset + num_bytes > len(data):
        raise HeadError(f"tensor {name!r} of shape {list(place.shape)} ends behind the end of the file")
    values = data[place.offset : place.offset + num_bytes]
    shape = place.shape[::-1]
    if kind in PLAIN:
        return GgufTensor(name, place.shape, kind, values.view(PLAIN[kind]).reshape(shape))
    if not place.shape or place.shape[0] % block_size:
        raise HeadError(f"tensor {name!r}: rows of {list(place.shape)} elements do not fill blocks of {block_size}")
    return GgufTensor(name, place.shape, kind, values.reshape(quant_shape_to_byte_shape(shape, kind)))
