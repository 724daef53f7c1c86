"""The sequences of one pass: values that `attend` builds once per pass and the attention kernels read.

T tokens, S sequences, B blocks of a table.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from stoker.model.kernels.fused.attention.splits import DecodeScratch
from stoker.model.kernels.long_prompts import LongPrompts

PADDING_LIMIT = 2
"""A sequence joins a group whose longest one is at most so many times longer."""


@dataclass(frozen=True)
class PackedGroup:
    """Packed sequences of about the same length, padded to the longest at their ends."""

    token_rows: Tensor | None
    """int64 [S * padded_len]: which token stands at each place, any one at padding; None: the group is the whole pass
    and has no padding.
    """
    num_sequences: int
    padded_len: int
    masks: dict[int | None, Tensor]
    """Per window: additive [padded_len, padded_len] in the compute dtype; made at first use."""


@dataclass(frozen=True)
class PackedGroups:
    """All sequences of a pass, for kernels that cannot read packed ones."""

    groups: tuple[PackedGroup, ...]
    places: Tensor | None
    """int64 [T]: where each token stands among the groups' places, end to end; None: one group without padding."""


@dataclass(frozen=True)
class PackedSequences:
    """Whole sequences one after another."""

    cu_seqlens: Tensor
    """int32 [S + 1] on the tokens' device: where each sequence begins, and the end."""
    max_seqlen: int
    bounds: tuple[int, ...]
    """The same numbers as in cu_seqlens, on the host."""

    @cached_property
    def lengths(self) -> list[int]:
        return [end - begin for begin, end in itertools.pairwise(self.bounds)]

    @cached_property
    def padded(self) -> PackedGroups:
        """Return the padded groups, made at first use: kernels that read cu_seqlens do without."""
        return pad_sequences(self.bounds, self.lengths, self.cu_seqlens.device)


@dataclass(frozen=True)
class CachedSequence:
    """Tokens `[query_start, query_end)` of the pass are the last ones of a sequence whose keys are all in the cache."""

    query_start: int
    query_end: int
    seq_len: int
    """Keys, this pass's own included."""
    block_rows: Tensor
    """int64 [layers, 2 * blocks]: rows of the cache seen as [rows, block_size, kv_heads, head_dim]; all key blocks,
    then all value blocks.
    """
    masks: dict[int | None, Tensor]
    """Per window: additive [queries, seq_len] in the compute dtype; made at first use."""


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one new token each and about the same length, padded to the longest."""

    token_rows: Tensor | None
    """int64 [S]: their places among the tokens; None: the group is the whole pass in order."""
    num_sequences: int
    padded_len: int
    seq_lens: Tensor
    """int64 [S]: keys of each sequence, its own included."""
    block_rows: Tensor
    """int64 [layers, 2 * S * blocks], as in CachedSequence."""
    masks: dict[int | None, Tensor]
    """Per window: additive [S, 1, 1, padded_len] in the cache's dtype; made at first use."""

    @cached_property
    def key_distances(self) -> Tensor:
        """int64 [S, 1, 1, padded_len]: distance of each key from the query; negative beyond the sequence's end."""
        places = torch.arange(self.padded_len, device=self.seq_lens.device)
        return (self.seq_lens[:, None] - 1 - places)[:, None, None, :]


@dataclass(frozen=True)
class PagedSequences:
    """One engine step, planned on the host for kernels that gather whole sequences."""

    num_tokens: int
    slot_rows: Tensor
    """int64 [layers, 2 * T]: rows of the cache seen as [rows, kv_heads, head_dim] that the new keys, then the new
    values go to.
    """
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[CachedSequence, ...]
    """The other sequences; in deterministic mode all of them, so that every token takes the same path."""

    def fit(self, num_rows: int) -> bool:
        """Whether this step has so many rows of q."""
        return num_rows == self.num_tokens


@dataclass(frozen=True)
class DeviceSequences:
    """One engine step in buffers on the device, which kernels read by themselves.

    Launches follow from the host's numbers here, never from what is in the tensors.
    """

    num_tokens: int
    num_sequences: int
    num_decodes: int
    """The first so many sequences have one new token each, which are the first rows; or, at their end, none (padding),
    and then prompts' rows begin earlier.
    """
    query_start: Tensor
    """int32 [S + 1]"""
    seq_lens: Tensor
    """int32 [S]; 0: padding."""
    slots: Tensor
    """int32 [T]: block id * block_size + offset; -1: padding, not written."""
    block_tables: Tensor
    """int32 [S, B]"""
    scratch: DecodeScratch
    prompts: LongPrompts | None = None
    """All sequences that are no decodes, where flash-attn-4 attends for them; then the step has no padding."""

    @property
    def is_decode(self) -> bool:
        """Whether there is one row per sequence: such a step may be padded to more rows."""
        return self.num_decodes == self.num_sequences

    def fit(self, num_rows: int) -> bool:
        """Whether this step has so many rows of q, padding included."""
        most = min(len(self.seq_lens), len(self.slots)) if self.is_decode else self.num_tokens
        return self.num_tokens <= num_rows <= most


def pack_sequences(
    cu_seqlens: Tensor, max_seqlen: int | None = None, device: torch.device | str | None = None
) -> PackedSequences:
    """Read the bounds; those on the host cost no wait.

    Raises ValueError where they do not rise from 0. `device`: the tokens', if not that of `cu_seqlens`.
    """
    bounds = tuple(int(bound) for bound in cu_seqlens.tolist())
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    if not lengths or bounds[0] != 0 or min(lengths) < 1:
        raise ValueError(f"cu_seqlens must rise from 0, not {list(bounds[:8])}")
    return PackedSequences(upload(cu_seqlens.to(torch.int32), device), max_seqlen or max(lengths), bounds)


def upload(numbers: Tensor, device: torch.device | str | None) -> Tensor:
    """Copy to the device without waiting; torch keeps the pinned memory until the copy is done."""
    device = numbers.device if device is None else torch.device(device)
    if numbers.device.type == device.type:
        return numbers
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


def pad_sequences(bounds: tuple[int, ...], lengths: list[int], device: torch.device) -> PackedGroups:
    longest = max(lengths)
    if min(lengths) == longest:
        return PackedGroups((PackedGroup(None, len(lengths), longest, {}),), None)
    groups, places = [], torch.empty(bounds[-1], dtype=torch.int64)
    used = 0
    for members in group_by_length(list(range(len(lengths))), lengths):
        group = packed_group(members, bounds, lengths)
        assert group.token_rows is not None
        for number, i in enumerate(members):
            begin = used + number * group.padded_len
            places[bounds[i] : bounds[i + 1]] = torch.arange(begin, begin + lengths[i])
        used += len(group.token_rows)
        groups.append(PackedGroup(upload(group.token_rows, device), group.num_sequences, group.padded_len, group.masks))
    return PackedGroups(tuple(groups), upload(places, device))


def packed_group(members: list[int], bounds: tuple[int, ...], lengths: list[int]) -> PackedGroup:
    padded_len = max(lengths[i] for i in members)
    begins = torch.tensor([bounds[i] for i in members])
    ends = torch.tensor([bounds[i + 1] for i in members])
    rows = torch.minimum(begins[:, None] + torch.arange(padded_len), ends[:, None] - 1)
    return PackedGroup(rows.flatten(), len(members), padded_len, {})


def group_by_length(members: list[int], lengths: list[int]) -> list[list[int]]:
    """Return groups of sequences of similar length, each group in the order of the pass."""
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(members, key=lambda i: -lengths[i]):
        if not groups or lengths[i] * PADDING_LIMIT < longest:
            groups.append([])
            longest = lengths[i]
        groups[-1].append(i)
    return [sorted(group) for group in groups]
