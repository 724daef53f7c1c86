"""Filling a decoder from any store of Hugging Face tensors: each rank reads the boxes of its parts table, no more.

Called by every source of this folder and by the trainer's initial weights; changes the decoder's parameters only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from stoker.model.decoder import Decoder
from stoker.model.parameter import Part

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias")
"""Buffers that old files carry although they follow from the config."""

OnProgress = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


class WeightsError(ValueError):
    """The weights do not fit the model: a name is missing, unknown, or has another shape."""


class NoWeights(WeightsError):
    """There is nothing at the path that could be weights: it is another path that is meant."""


class TensorStore(Protocol):
    """Global tensors under Hugging Face names."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor of the store."""
        ...

    def read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """A box of one tensor, in the store's dtype, on the CPU."""
        ...


@torch.no_grad()
def load_parts(decoder: Decoder, store: TensorStore, progress: OnProgress | None = None) -> None:
    """Copy every part of the decoder out of the store, converted to the parameters' dtype.

    Raises WeightsError, before anything is read, where names or shapes do not fit.
    """
    check_fit(decoder, store)
    parts = list(decoder.named_parts())
    total, done = sum(part.num_elements for part in parts), 0
    for part in parts:
        load_part(part, store)
        done += part.num_elements
        if progress is not None:
            progress(done, total)


@torch.no_grad()
def load_part(part: Part, store: TensorStore) -> None:
    """Copy one part of a decoder out of a store that fits it."""
    part.local().copy_(store.read(part.hf_name, part.start, part.size))


def check_fit(decoder: Decoder, store: TensorStore) -> None:
    """Check that the store has the model's tensors and no others. Raises WeightsError."""
    shapes = store.shapes()
    for part in decoder.named_parts():
        if part.hf_name not in shapes:
            raise WeightsError(f"weights: {part.hf_name} is missing")
        if (found := tuple(shapes[part.hf_name])) != part.global_shape:
            raise WeightsError(
                f"weights: {part.hf_name} has shape {list(found)}, the configuration needs {list(part.global_shape)}"
            )
    if decoder.is_first and decoder.is_last:
        refuse_unknown(decoder, shapes)
    check_tie(decoder, store)


def refuse_unknown(decoder: Decoder, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors that the model would not use: the model is then not what its config describes."""
    known = {part.hf_name for part in decoder.named_parts()} | decoder.names_elsewhere()
    if decoder.config.tie_embeddings:
        known.add(HEAD)  # some writers store the tied table twice: `check_tie`
    unknown = [name for name in shapes if name not in known and not name.endswith(IGNORED_SUFFIXES)]
    if unknown:
        raise WeightsError(
            f"weights: the model has no place for {len(unknown)} tensors: {', '.join(sorted(unknown)[:5])}"
        )


def check_tie(decoder: Decoder, store: TensorStore) -> None:
    """Check that the copies of a tied table that is stored twice are equal.

    Else the model has an output layer of its own.
    """
    if not decoder.config.tie_embeddings or HEAD not in store.shapes():
        return
    table = next((part for part in decoder.named_parts() if part.hf_name == TABLE), None)
    if table is None:  # a slice between the ends
        return
    if (found := tuple(store.shapes()[HEAD])) != table.global_shape:
        raise WeightsError(
            f"weights: {HEAD} has shape {list(found)}, the configuration needs {list(table.global_shape)}"
        )
    if not torch.equal(store.read(TABLE, table.start, table.size), store.read(HEAD, table.start, table.size)):
        raise WeightsError(f"weights: tie_word_embeddings is set, but {HEAD} differs from {TABLE}")


def box_slices(start: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + extent) for begin, extent in zip(start, size, strict=True))
