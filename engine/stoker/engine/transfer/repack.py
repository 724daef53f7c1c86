"""Blocks of other widths and sizes: cut and join layers, heads and tokens between two layouts.

A sender that runs on S ranks with blocks of one size serves a receiver whose rank has other layers, other heads or
another block size. `pieces` says which box of which source block goes where; `repack` copies the boxes. The bytes are
moved, never converted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.port import LayoutMismatch


class Box(NamedTuple):
    """A range of layers, tokens and heads inside of a block, from the block's own beginning."""

    layers: slice
    tokens: slice
    heads: slice


class Piece(NamedTuple):
    """One box that is copied from a source block to a target block."""

    rank: int
    source_block: int
    """Index in the request, in blocks of the source."""
    source: Box
    target_block: int
    """Index in the request, in blocks of the target."""
    target: Box


def pieces(sources: Sequence[BlockLayout], target: BlockLayout, target_blocks: range) -> Iterator[Piece]:
    """The boxes that fill these blocks of the target.

    Args:
        sources: the layout of each rank of the sender.
        target: the layout of the receiving rank.
        target_blocks: indices in the request, in blocks of the target.

    Raises:
        LayoutMismatch: dtype or head size differ, or the sources lack layers or heads of the target.
    """
    refuse_unlike(sources, target)
    block_size = target.block_size
    for rank, source in enumerate(sources):
        layers = _common(source.first_layer, source.end_layer, target.first_layer, target.end_layer)
        heads = _common(source.first_head, source.end_head, target.first_head, target.end_head)
        if not layers or not heads:
            continue
        for block in target_blocks:
            first, end = block * block_size, (block + 1) * block_size
            for source_block in range(first // source.block_size, -(-end // source.block_size)):
                begin = source_block * source.block_size
                tokens = _common(begin, begin + source.block_size, first, end)
                yield Piece(
                    rank, source_block,
                    _box(layers, tokens, heads, source.first_layer, begin, source.first_head),
                    block,
                    _box(layers, tokens, heads, target.first_layer, first, target.first_head),
                )  # fmt: skip


def refuse_unlike(sources: Sequence[BlockLayout], target: BlockLayout) -> None:
    """Refuse sources that do not cover the target exactly once."""
    for source in sources:
        for field in ("dtype", "head_dim"):
            ours, theirs = getattr(target, field), getattr(source, field)
            if ours != theirs:
                raise LayoutMismatch(field, ours, theirs)
    cells = np.zeros((target.num_layers, target.num_heads), dtype=np.int64)
    for source in sources:
        layers = _common(source.first_layer, source.end_layer, target.first_layer, target.end_layer)
        heads = _common(source.first_head, source.end_head, target.first_head, target.end_head)
        cells[_moved(layers, target.first_layer), _moved(heads, target.first_head)] += 1
    if (cells != 1).any():
        layer, head = (int(place) for place in np.argwhere(cells != 1)[0])
        place = f"layer {target.first_layer + layer}, head {target.first_head + head}"
        raise LayoutMismatch(f"ranks with {place}", 1, int(cells[layer, head]))


def repack(
    sources: Sequence[tuple[BlockLayout, Mapping[int, np.ndarray]]],
    target: BlockLayout,
    blocks: Mapping[int, np.ndarray],
) -> None:
    """Fill target blocks from the blocks of the sender's ranks.

    `sources` and `blocks` map an index in the request to a block's bytes, [block_bytes] uint8.
    """
    layouts = [layout for layout, _ in sources]
    by_rank = [{index: _shaped(data, layout) for index, data in held.items()} for layout, held in sources]
    filled = {index: _shaped(data, target) for index, data in blocks.items()}
    for index in filled:
        for piece in pieces(layouts, target, range(index, index + 1)):
            box, source = piece.target, piece.source
            filled[index][box.layers, :, box.tokens, box.heads] = by_rank[piece.rank][piece.source_block][
                source.layers, :, source.tokens, source.heads
            ]


def _shaped(data_N: np.ndarray, layout: BlockLayout) -> np.ndarray:
    """[layers, 2, tokens, heads, dim * item bytes], a view."""
    layers, two, tokens, heads, dim = layout.shape
    return data_N.reshape(layers, two, tokens, heads, dim * layout.item_bytes)


def _common(first: int, end: int, other_first: int, other_end: int) -> range:
    return range(max(first, other_first), min(end, other_end))


def _moved(span: range, origin: int) -> slice:
    return slice(span.start - origin, max(span.stop, span.start) - origin)


def _box(layers: range, tokens: range, heads: range, layer: int, token: int, head: int) -> Box:
    return Box(_moved(layers, layer), _moved(tokens, token), _moved(heads, head))
