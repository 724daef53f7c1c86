"""The serialised form of blocks: what was written is read; anything else is refused before it is used."""

from __future__ import annotations

import io
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.engine.transfer.checksum import raw_sums, seeded
from stoker.engine.transfer.fingerprint import Fingerprint, content_digest, root_digest
from stoker.engine.transfer.landing_zone import BlockRefused
from stoker.engine.transfer.port import LayoutMismatch
from stoker.engine.transfer.serial import BlockHeader, SerialBlocks, read_blocks, write_blocks
from stoker.engine.transfer.ticket import TransferError
from testing.engine.transfers import FINGERPRINT, LAYOUT, random_blocks

HEADER = BlockHeader(
    fingerprint=FINGERPRINT, salt="tenant", first_token=8, count=2, layout=LAYOUT, content=b"c" * 32,
    created_s=1000.0, ttl_s=60.0,
)  # fmt: skip
SEEDS = (5, 6)
EXPECTED: dict[str, Any] = {
    "fingerprint": FINGERPRINT, "salt": "tenant", "layout": LAYOUT, "content": b"c" * 32, "seeds": SEEDS,
    "now_s": 1001.0,
}  # fmt: skip


def written(header: BlockHeader = HEADER, damage: int | None = None) -> bytes:
    data = random_blocks(2)
    sums = [seeded(int(raw), seed) for raw, seed in zip(raw_sums(data), SEEDS, strict=True)]
    if damage is not None:
        data[damage, 0] ^= 1
    stream = io.BytesIO()
    write_blocks(stream, header, data, sums, (3, 4))
    return stream.getvalue()


def read(data: bytes, **changes: Any) -> SerialBlocks:
    return read_blocks(io.BytesIO(data), **EXPECTED | changes)


def test_what_was_written_is_read() -> None:
    blocks = read(written())
    assert (blocks.header, blocks.generations) == (HEADER, (3, 4))
    assert np.array_equal(blocks.data, random_blocks(2))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", FINGERPRINT[::-1]),
        ("salt", "other"),
        ("layout", replace(LAYOUT, end_head=3)),
        ("content", b"d" * 32),
        ("parent", b"p" * 32),
        ("tokens", (1, 2)),
    ],
)
def test_blocks_of_something_else_are_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(LayoutMismatch, match=field) as error:
        read(written(), **{field: value})
    assert (error.value.field, error.value.ours) == (field, value)


def test_the_number_of_blocks_the_codec_and_the_version_must_fit() -> None:
    with pytest.raises(LayoutMismatch, match="count"):
        read(written(), seeds=(1,))
    for header in (replace(HEADER, codec="lz4"), replace(HEADER, version=1), replace(HEADER, version=3)):
        with pytest.raises(LayoutMismatch, match="version and codec"):
            read(written(header))


def test_expired_and_damaged_blocks_are_refused() -> None:
    with pytest.raises(BlockRefused, match="late: the blocks expired 40 s ago"):
        read(written(), now_s=1100.0)
    assert read(written(replace(HEADER, ttl_s=0.0)), now_s=1e9).sums
    with pytest.raises(BlockRefused, match="damaged: block 1"):
        read(written(damage=1))
    with pytest.raises(BlockRefused, match="damaged: block 0"):
        read(written(), seeds=(6, 5))


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_changed_or_cut_file_is_never_read(data: st.DataObject) -> None:
    whole = bytearray(written())
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole[place] ^= data.draw(st.integers(1, 255))
    else:
        del whole[place:]
    with pytest.raises((TransferError, BlockRefused)):
        read(bytes(whole))


def test_a_size_that_does_not_fit_is_refused_when_writing() -> None:
    with pytest.raises(ValueError, match="blocks must be"):
        write_blocks(io.BytesIO(), HEADER, random_blocks(3), (1, 2, 3), (1, 2, 3))


OURS = Fingerprint(
    weights="w", revision="r", model="m", kv_dtype="bfloat16", num_layers=2, num_kv_heads=2, head_dim=16
)  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in fields(Fingerprint)])
def test_every_field_of_a_fingerprint_counts_and_is_named(field: str) -> None:
    value = getattr(OURS, field)
    changed: dict[str, Any] = {field: value + 1 if isinstance(value, int) else value + "x"}
    theirs = replace(OURS, **changed)
    assert theirs.digest != OURS.digest
    with pytest.raises(LayoutMismatch, match=field):
        OURS.refuse_other(theirs)
    OURS.refuse_other(replace(OURS))


def test_contents_of_other_tokens_tenants_or_models_have_other_digests() -> None:
    roots = [root_digest(FINGERPRINT), root_digest(FINGERPRINT, "a"), root_digest(FINGERPRINT[:31], "a")]
    digests = [content_digest(root, tokens) for root in roots for tokens in ((1, 2), (2, 1), (1, 258), (1,))]
    assert len({*roots, *digests}) == len(roots) + len(digests)
    assert content_digest(digests[0], (3,)) != content_digest(digests[1], (3,))
