"""The serialised form of blocks, for disks, stores and streams.

    magic, length of the header, header (a msgpack array), length of the sums, sums, blocks one after the other, digest

The digest is blake3 over all before it. A reader names what it expects; whatever differs is refused before a byte of a
block is used. Numbers are little-endian. `codec` is always `none`: compression is not built. Without loss, bfloat16
keys and values keep two thirds of their bytes, at rates that pay on no link of ours (`bench/block_compression.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import BinaryIO

import msgpack
import numpy as np
from blake3 import blake3

from stoker.engine.transfer.checksum import raw_sums, seeded
from stoker.engine.transfer.landing_zone import BlockRefused
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.port import LayoutMismatch
from stoker.engine.transfer.ticket import TransferError

MAGIC = b"stokerKV"
VERSION = 2
MOST_HEADER_BYTES = 65536
MOST_BLOCKS = 65536
_LENGTH = struct.Struct("<I")
_SUM = struct.Struct("<QQ")
_DIGEST_BYTES = 32


@dataclass(frozen=True)
class BlockHeader:
    """What the blocks are."""

    fingerprint: bytes
    salt: str
    """Of the tenant."""
    first_token: int
    """Index of the first block's first token; 0 where `content` alone tells the place."""
    count: int
    """Number of blocks."""
    layout: BlockLayout
    content: bytes
    """Digest of all tokens up to the end of the last block."""
    created_s: float
    """Seconds since 1970."""
    ttl_s: float
    """0: no end."""
    codec: str = "none"
    version: int = VERSION
    parent: bytes = b""
    """Digest of all tokens before the first block; empty where it was not given."""
    tokens: tuple[int, ...] = ()
    """The blocks' own tokens; empty where they were not given."""


@dataclass(frozen=True)
class SerialBlocks:
    """What was read."""

    header: BlockHeader
    generations: tuple[int, ...]
    sums: tuple[int, ...]
    raw_sums: tuple[int, ...]
    """The same without their seeds."""
    data: np.ndarray
    """[count, block_bytes] uint8."""


class _Hashed:
    """Writes or reads through a digest."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.digest = stream, blake3()

    def write(self, data: bytes | memoryview) -> None:
        self.digest.update(data)
        self.stream.write(data)

    def read(self, length: int) -> bytes:
        data = self.stream.read(length)
        if len(data) != length:
            raise TransferError(f"the file ends early: {length} bytes were expected, {len(data)} came")
        self.digest.update(data)
        return data


def write_blocks(
    stream: BinaryIO, header: BlockHeader, data_BN: np.ndarray, sums: Sequence[int], generations: Sequence[int]
) -> None:
    """Write blocks ([count, block_bytes] uint8) with their seeded sums."""
    if data_BN.shape != (header.count, header.layout.block_bytes):
        expected = (header.count, header.layout.block_bytes)
        raise ValueError(f"blocks must be {expected}, got {data_BN.shape}")
    out = _Hashed(stream)
    fields = [*astuple(header)]
    packed: bytes = msgpack.packb([list(field) if isinstance(field, tuple) else field for field in fields])
    out.write(MAGIC)
    out.write(_LENGTH.pack(len(packed)))
    out.write(packed)
    for generation, total in zip(generations, sums, strict=True):
        out.write(_SUM.pack(generation, total))
    out.write(np.ascontiguousarray(data_BN).data.cast("B"))
    stream.write(out.digest.digest())


def read_blocks(
    stream: BinaryIO, *, fingerprint: bytes, salt: str, layout: BlockLayout, content: bytes, seeds: Sequence[int],
    now_s: float, parent: bytes = b"", tokens: tuple[int, ...] = (),
) -> SerialBlocks:  # fmt: skip
    """Read blocks and check everything.

    Raises:
        TransferError: not this form, cut off or changed on the way.
        LayoutMismatch: of another model, tenant, layout or content, with the field.
        BlockRefused: expired (late), or a block's sum is wrong (damaged).
    """
    source = _Hashed(stream)
    header = _read_header(source)
    expected = {"fingerprint": fingerprint, "salt": salt, "layout": layout, "content": content}
    expected |= {"count": len(seeds), "parent": parent, "tokens": tokens}
    for field, ours in expected.items():
        if getattr(header, field) != ours:
            raise LayoutMismatch(field, ours, getattr(header, field))
    if header.ttl_s and now_s >= header.created_s + header.ttl_s:
        raise BlockRefused("late", f"the blocks expired {now_s - header.created_s - header.ttl_s:.0f} s ago")
    marks = [_SUM.unpack(source.read(_SUM.size)) for _ in range(header.count)]
    data = np.frombuffer(source.read(header.count * layout.block_bytes), dtype=np.uint8)
    digest = source.digest.digest()
    if stream.read(_DIGEST_BYTES) != digest:
        raise TransferError("the digest does not match: the file was changed or cut off")
    data_BN = data.reshape(header.count, layout.block_bytes)
    sums = tuple(total for _, total in marks)
    raws = tuple(int(raw) for raw in raw_sums(data_BN))
    for index, (raw, seed, total) in enumerate(zip(raws, seeds, sums, strict=True)):
        if seeded(raw, seed) != total:
            raise BlockRefused("damaged", f"block {index} has another checksum than its header")
    return SerialBlocks(header, tuple(generation for generation, _ in marks), sums, raws, data_BN)


def _read_header(source: _Hashed) -> BlockHeader:
    if source.read(len(MAGIC)) != MAGIC:
        raise TransferError("not a file of cache blocks")
    (length,) = _LENGTH.unpack(source.read(_LENGTH.size))
    if length > MOST_HEADER_BYTES:
        raise TransferError(f"the header has {length} bytes, at most {MOST_HEADER_BYTES} are allowed")
    try:
        fields = list(msgpack.unpackb(source.read(length), use_list=False))
        fields[4] = BlockLayout(*fields[4])
        header = BlockHeader(*fields)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise TransferError(f"the header cannot be read: {error}") from error
    if header.version != VERSION or header.codec != "none":
        raise LayoutMismatch("version and codec", (VERSION, "none"), (header.version, header.codec))
    if not all(isinstance(seconds, int | float) for seconds in (header.created_s, header.ttl_s)):
        raise TransferError(f"created_s and ttl_s must be seconds, got {header.created_s!r}, {header.ttl_s!r}")
    if not isinstance(header.count, int) or not 0 <= header.count <= MOST_BLOCKS:
        raise TransferError(f"count must be 0 to {MOST_BLOCKS}, got {header.count!r}")
    return header
