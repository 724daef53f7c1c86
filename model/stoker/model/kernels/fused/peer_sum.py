"""One-shot sums over the GPUs of one host: every rank stores its rows in the others' memory and adds what it gets.

One kernel adds the ranks' parts, the residual stream and normalises. Each 8-byte word carries 4 bytes of values and the
number of the call, as NCCL's protocol for short messages does, so values and their arrival are one store: there is no
barrier and no fence. A receiver waits until every word of a row has the number of this call.

Two inboxes take turns. A program that sends overwrites what its peer received in the call before last; that peer has
begun the last call, whose words have arrived here, so it is done with the one before. Row r always belongs to program
r % PROGRAMS, whatever the number of rows, and each program counts its own calls. All ranks make the same calls with the
same numbers of rows, in the same order; a graph may hold them, because the count is in the memory of the device.

The ranks' parts are added in the order of ranks in float32, and rounded once: every rank has the same bits.

T rows, W words of a row (4 bytes: one float32, or two values of 2 bytes).

Called by the engine's `peer_sums`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.launch import overlap, wait_for_last
from stoker.model.kernels.fused.peer_memory import KINDS, WORD_BYTES, PeerMemory

PROGRAMS = 128
"""At most as many as multiprocessors, so that all programs of a launch run at once."""
SPINS = 2**28
"""Looks at an inbox after which a peer counts as lost and the kernel fails: minutes."""
CHECKED = 2**10
"""Looks at an inbox between two at the word that ends all waiting."""
FLOAT32, BFLOAT16, FLOAT16 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def inbox_words(ranks: int, max_rows: int, max_words: int) -> int:
    """Return the length of a rank's inbox, int64 [2, ranks, max_rows, max_words], in words of 8 bytes."""
    return 2 * ranks * max_rows * max_words


def sum_rows(x_TD: Tensor, inboxes: PeerMemory, *, sends: bool = True, receives: bool = True) -> Tensor:
    """Return the sum over the ranks. Without `sends` or `receives` only the other half is done, for tests."""
    return launch(x_TD, None, None, 0.0, inboxes, sends, receives)[0]


def sum_norm_rows(
    x_TD: Tensor,
    residual_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    inboxes: PeerMemory,
    *,
    sends: bool = True,
    receives: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return (norm(residual + sum), residual + sum)."""
    total_TD, normed_TD = launch(x_TD, residual_TD, norm_D, eps, inboxes, sends, receives)
    return normed_TD, total_TD


def launch(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    norm_D: Tensor | None,
    eps: float,
    inboxes: PeerMemory,
    sends: bool,
    receives: bool,
) -> tuple[Tensor, Tensor]:
    x_TD = x_TD.contiguous()
    total_TD = torch.empty_like(x_TD)
    normed_TD = total_TD if norm_D is None else torch.empty_like(x_TD)
    words = x_TD.shape[1] * x_TD.itemsize // WORD_BYTES
    block = triton.next_power_of_2(words)
    peer_sum_kernel[(min(x_TD.shape[0], PROGRAMS),)](
        as_words(x_TD),
        None if residual_TD is None else as_words(residual_TD.contiguous()),
        None if norm_D is None else as_words(norm_D),
        as_words(total_TD),
        as_words(normed_TD),
        inboxes.addresses,
        inboxes.calls,
        x_TD.shape[0],
        words,
        x_TD.shape[1],
        inboxes.max_words,
        eps,
        RANK=inboxes.rank,
        RANKS=inboxes.ranks,
        MAX_ROWS=inboxes.max_rows,
        KIND=KINDS[x_TD.dtype],
        HAS_RESIDUAL=residual_TD is not None,
        HAS_NORM=norm_D is not None,
        SENDS=sends,
        RECEIVES=receives,
        **asm_of(pack_of(block)),
        BLOCK=block,
        enable_fp_fusion=False,
        num_warps=warps_of(block),
        **overlap(),
    )
    return total_TD, normed_TD


def as_words(x: Tensor) -> Tensor:
    return x if x.dtype is torch.int32 else x.view(torch.int32)


def warps_of(block: int) -> int:
    return min(16, max(1, block // 128))


def pack_of(block: int) -> int:
    """Return the number of words that a thread waits for at once; 0 in the interpreter, which knows no assembly."""
    return 0 if triton.knobs.runtime.interpret else min(4, max(1, block // 32 // warps_of(block)))


def asm_of(pack: int) -> dict[str, int | str]:
    """Return the kernel's constants for the wait: `pack` loads are on their way at a time.

    Operands: `pack` values, as many addresses, numbers of the call, and addresses of the word that ends all waiting.
    """
    looks = "".join(f"ld.volatile.global.v2.u32 {{${place}, f{place}}}, [${pack + place}]; " for place in range(pack))
    checks = "".join(f"setp.ne.u32 m, f{place}, ${2 * pack}; @m bra AGAIN; " for place in range(pack))
    flags = ", ".join(f"f{place}" for place in range(pack))
    asm = f"""{{
        .reg .pred m;
        .reg .b32 {flags or "f0"}, spins, word;
        mov.u32 spins, 0;
        LOOK: {looks}
        {checks}
        bra DONE;
        AGAIN: add.u32 spins, spins, 1;
        and.b32 word, spins, {CHECKED - 1};
        setp.ne.u32 m, word, 0;
        @m bra LOOK;
        ld.volatile.global.u32 word, [${3 * pack}];
        setp.ne.u32 m, word, 0;
        @m trap;
        setp.ge.u32 m, spins, {SPINS};
        @m trap;
        bra LOOK;
        DONE:
    }}"""
    kinds = ("=&r", "l", "r", "l")
    return {"PACK": pack, "ASM": asm, "CONSTRAINTS": ",".join(kind for kind in kinds for _ in range(pack))}


@triton.jit(do_not_specialize=["num_rows"])
def peer_sum_kernel(
    x, residual, norm, total, normed, addresses, calls, num_rows, words, columns, max_words, eps,
    RANK: tl.constexpr, RANKS: tl.constexpr, MAX_ROWS: tl.constexpr, KIND: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr, SENDS: tl.constexpr, RECEIVES: tl.constexpr,
    PACK: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < words
    own_inbox = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64))
    stop = tl.load(addresses + RANKS).to(tl.pointer_type(tl.int32))
    wait_for_last(OVERLAPS)
    call = tl.load(calls + program) + 1
    turn = (call & 1) * RANKS
    row = program
    if SENDS:
        while row < num_rows:
            values = tl.load(x + row.to(tl.int64) * words + place, mask=inside, other=0)
            packed = (call.to(tl.int64) << 32) | (values.to(tl.int64) & 0xFFFFFFFF)
            for peer in tl.static_range(RANKS):
                if peer != RANK:
                    inbox = tl.load(addresses + peer).to(tl.pointer_type(tl.int64))
                    begin = ((turn + RANK) * MAX_ROWS + row).to(tl.int64) * max_words
                    tl.store(inbox + begin + place, packed, mask=inside)
            row += tl.num_programs(0)
    if RECEIVES:
        row = program
        while row < num_rows:
            begin = row.to(tl.int64) * words
            low = tl.zeros([BLOCK], dtype=tl.float32)
            high = tl.zeros([BLOCK], dtype=tl.float32)
            for source in tl.static_range(RANKS):
                if source == RANK:
                    received = tl.load(x + begin + place, mask=inside, other=0)
                else:
                    there = ((turn + source) * MAX_ROWS + row).to(tl.int64) * max_words
                    # words behind the row's end are looked for at its last one
                    words_at = own_inbox + there + tl.minimum(place, words - 1)
                    received = receive(words_at, inside, call, stop, PACK, ASM, CONSTRAINTS)
                first, second = unpack(received, KIND)
                low += first
                high += second
            if HAS_RESIDUAL:
                low, high = rounded(low, high, KIND)
                first, second = unpack(tl.load(residual + begin + place, mask=inside, other=0), KIND)
                low += first
                high += second
            tl.store(total + begin + place, pack(low, high, KIND), mask=inside)
            if HAS_NORM:
                low, high = rounded(low, high, KIND)
                squares = tl.sum(low * low, 0) + tl.sum(high * high, 0)
                scale = 1.0 / tl.sqrt_rn(squares / columns + eps)
                first, second = unpack(tl.load(norm + place, mask=inside, other=0), KIND)
                tl.store(normed + begin + place, pack(low * scale * first, high * scale * second, KIND), mask=inside)
            row += tl.num_programs(0)
        tl.store(calls + program, call)


@triton.jit
def receive(inbox, inside, call, stop, PACK: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr):
    """Wait for all words of a row that carry the number of this call, and return their values.

    Each thread waits for its own words; in the interpreter (PACK 0) all wait together. The kernel fails where the host
    ends the wait.
    """
    if PACK > 0:
        values = tl.inline_asm_elementwise(
            ASM,
            CONSTRAINTS,
            [inbox.to(tl.int64), call, stop.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=PACK,
        )
        return tl.where(inside, values, 0)
    packed = tl.load(inbox, mask=inside, other=0, volatile=True)
    while tl.sum((inside & ((packed >> 32).to(tl.int32) != call)).to(tl.int32), 0) > 0:
        packed = tl.load(inbox, mask=inside, other=0, volatile=True)
    return packed.to(tl.int32)


@triton.jit
def unpack(words, KIND: tl.constexpr):
    """The values of each word, lower half first, in float32. A float32 is one value; its second is zero."""
    if KIND == FLOAT32:
        return words.to(tl.float32, bitcast=True), tl.zeros_like(words).to(tl.float32)
    if KIND == BFLOAT16:
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def pack(low, high, KIND: tl.constexpr):
    if KIND == FLOAT32:
        return low.to(tl.int32, bitcast=True)
    if KIND == BFLOAT16:
        first = low.to(tl.bfloat16).to(tl.int16, bitcast=True)
        second = high.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        first = low.to(tl.float16).to(tl.int16, bitcast=True)
        second = high.to(tl.float16).to(tl.int16, bitcast=True)
    return (second.to(tl.int32) << 16) | (first.to(tl.int32) & 0xFFFF)


@triton.jit
def rounded(low, high, KIND: tl.constexpr):
    """The values as they are stored."""
    return unpack(pack(low, high, KIND), KIND)
