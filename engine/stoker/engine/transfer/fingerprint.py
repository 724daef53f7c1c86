"""What two engines must have in common before a block of one means anything to the other.

Tensor and pipeline widths and block sizes are not part of it: blocks are repacked (`repack`).
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, fields

from blake3 import blake3

from stoker.engine.transfer.port import PROTOCOL, LayoutMismatch

BLOCK_ORDER = "layers,2,tokens,heads,dim"


@dataclass(frozen=True)
class Fingerprint:
    """Every fact that decides which numbers a block of given tokens holds."""

    weights: str
    """Digest of the weights: of a checkpoint's manifest, or of the files."""
    revision: str
    """Of the deployment. Only pairs of one revision exchange blocks."""
    model: str
    """Digest of the model's configuration, with its rotation and windows (`digest_of`)."""
    kv_dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_scales: str = "none"
    """Digest of the scales of a quantised cache."""
    block_order: str = BLOCK_ORDER
    protocol: int = PROTOCOL

    @property
    def digest(self) -> bytes:
        """32 bytes of blake3 over all fields with their names."""
        return bytes.fromhex(digest_of(asdict(self)))

    def refuse_other(self, theirs: Fingerprint) -> None:
        """Compare with a peer's. Raises LayoutMismatch with the first field that differs."""
        for field in fields(self):
            mine, other = getattr(self, field.name), getattr(theirs, field.name)
            if mine != other:
                raise LayoutMismatch(field.name, mine, other)


def digest_of(facts: object) -> str:
    """blake3 of plain values in one canonical form, in hexadecimal."""
    return blake3(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def content_digest(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """Digest of all tokens up to the end of a block, from that of the block before it.

    The first block's parent is the digest of the fingerprint and the tenant's salt (`root_digest`), and of the
    request's salt (`salted_root`).
    """
    return blake3(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


def salt_digest(salt: str | None) -> bytes:
    """What stands for a request's salt in the keys of its blocks; empty without one."""
    return blake3(b"stoker salt" + salt.encode("utf-8", "surrogatepass")).digest() if salt is not None else b""


def salted_root(root: bytes, salt: bytes) -> bytes:
    """The parent of the first block of a request with a salt (`salt_digest`); without one it is the engine's."""
    return blake3(b"stoker salted root" + root + salt).digest() if salt else root


def root_digest(fingerprint: bytes, salt: str = "") -> bytes:
    """The parent of the first block: contents of different models, weights or tenants never have equal keys."""
    return blake3(b"stoker root" + len(fingerprint).to_bytes(4, "little") + fingerprint + salt.encode()).digest()
