"""Two-shot sums over the GPUs of one host: each rank adds some of the rows and stores them in the others' memory.

For messages too long for `peer_sum`, where every rank sends all of its rows to all others. Here row r belongs to rank
r % R: the others store their parts of it there (first shot), it adds them and stores the sum everywhere (second shot).
So a rank sends 2 (R - 1) / R times its bytes, as few as any all-reduce needs, and the norm that follows is part of the
same kernel.

Rows travel as they are. Behind them and a fence a program stores the number of the call into a flag of the same program
on each other rank, which waits for it. Every pair of programs exchanges both flags in every call, rows or
not, so no rank can be a whole call ahead of another; two turns of memory are enough. Row r always belongs to program
(r // R) % PROGRAMS, and each program counts its own calls, so calls of any numbers of rows follow each other, in graphs
or not. All ranks make the same calls in the same order.

The ranks' parts are added in the order of ranks in float32 and rounded once: the bits of `peer_sum`, on every rank.

T rows, R ranks, W words of a row (4 bytes: one float32, or two values of 2 bytes).

Called by the engine's `peer_sums`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.launch import overlap, wait_for_last
from stoker.model.kernels.fused.peer_memory import KINDS, WORD_BYTES, PeerMemory
from stoker.model.kernels.fused.peer_sum import CHECKED, SPINS, as_words, pack, rounded, unpack, warps_of

PROGRAMS = 128
"""At most as many as multiprocessors, so that all programs of a launch run at once."""
VECTOR_WORDS = 4
"""Words that one instruction moves: rows in the inboxes begin at multiples of them."""


def memory_words(ranks: int, max_rows: int, max_words: int) -> int:
    """Return the length of a rank's memory, in words of 4 bytes.

    It is int32: parts [2, ranks, own rows, max_words], sums [2, max_rows, max_words], flags [2, ranks, PROGRAMS].
    """
    return 4 * max_rows * max_words + 2 * ranks * PROGRAMS


def sum_rows(x_TD: Tensor, memory: PeerMemory, only: str | None = None) -> Tensor:
    """Return the sum over the ranks. `only` "send", "add" or "receive": one part of the work, for tests."""
    return launch(x_TD, None, None, 0.0, memory, only)[0]


def sum_norm_rows(
    x_TD: Tensor, residual_TD: Tensor, norm_D: Tensor, eps: float, memory: PeerMemory, only: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return (norm(residual + sum), residual + sum)."""
    total_TD, normed_TD = launch(x_TD, residual_TD, norm_D, eps, memory, only)
    return normed_TD, total_TD


def launch(
    x_TD: Tensor, residual_TD: Tensor | None, norm_D: Tensor | None, eps: float, memory: PeerMemory, only: str | None
) -> tuple[Tensor, Tensor]:
    x_TD = x_TD.contiguous()
    total_TD = torch.empty_like(x_TD)
    normed_TD = total_TD if norm_D is None else torch.empty_like(x_TD)
    words = x_TD.shape[1] * x_TD.itemsize // WORD_BYTES
    block = triton.next_power_of_2(words)
    two_shot_kernel[(min(triton.cdiv(x_TD.shape[0], memory.ranks), PROGRAMS),)](
        as_words(x_TD),
        None if residual_TD is None else as_words(residual_TD.contiguous()),
        None if norm_D is None else as_words(norm_D),
        as_words(total_TD),
        as_words(normed_TD),
        memory.addresses,
        memory.calls,
        x_TD.shape[0],
        words,
        x_TD.shape[1],
        eps,
        RANK=memory.rank,
        RANKS=memory.ranks,
        MAX_ROWS=memory.max_rows,
        MAX_WORDS=memory.max_words,
        PROGRAMS=PROGRAMS,
        KIND=KINDS[x_TD.dtype],
        HAS_RESIDUAL=residual_TD is not None,
        HAS_NORM=norm_D is not None,
        SENDS=only in (None, "send"),
        ADDS=only in (None, "add"),
        RECEIVES=only in (None, "receive"),
        ASM="" if triton.knobs.runtime.interpret else wait_asm(memory.rank, memory.ranks),
        BLOCK=block,
        enable_fp_fusion=False,
        num_warps=warps_of(block),
        **overlap(),
    )
    return total_TD, normed_TD


def wait_asm(rank: int, ranks: int) -> str:
    """Return the wait for the flags of all other ranks; all of them are looked at at a time.

    Operands: the value seen last, the address of rank 0's flag, the number of the call, the address of the word that
    ends all waiting.
    """
    others = [source for source in range(ranks) if source != rank]
    names = ", ".join(f"f{source}" for source in others)
    flags = [(f"f{source}", f"[$1+{4 * PROGRAMS * source}]") for source in others]
    looks = " ".join(f"ld.relaxed.sys.global.u32 {name}, {place};" for name, place in flags)
    checks = " ".join(f"setp.ne.u32 m, {name}, $2; @m bra AGAIN;" for name, _ in flags)
    return f"""{{
        .reg .pred m;
        .reg .b32 {names}, spins, word;
        mov.u32 spins, 0;
        LOOK: {looks}
        {checks}
        bra DONE;
        AGAIN: add.u32 spins, spins, 1;
        and.b32 word, spins, {CHECKED - 1};
        setp.ne.u32 m, word, 0;
        @m bra LOOK;
        ld.volatile.global.u32 word, [$3];
        setp.ne.u32 m, word, 0;
        @m trap;
        setp.ge.u32 m, spins, {SPINS};
        @m trap;
        bra LOOK;
        DONE: mov.u32 $0, {flags[-1][0]};
    }}"""


FENCE = tl.constexpr("fence.acq_rel.sys; mov.u32 $0, $1;")
"""What all threads of this program have stored is there, before a flag that is stored behind it."""


@triton.jit(do_not_specialize=["num_rows"])
def two_shot_kernel(
    x, residual, norm, total, normed, addresses, calls, num_rows, words, columns, eps,
    RANK: tl.constexpr, RANKS: tl.constexpr, MAX_ROWS: tl.constexpr, MAX_WORDS: tl.constexpr, PROGRAMS: tl.constexpr,
    KIND: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    SENDS: tl.constexpr, ADDS: tl.constexpr, RECEIVES: tl.constexpr,
    ASM: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    step = tl.num_programs(0) * RANKS
    place = tl.arange(0, BLOCK)
    inside = place < words
    SUMS: tl.constexpr = 2 * MAX_ROWS * MAX_WORDS
    FLAGS: tl.constexpr = 2 * SUMS
    stop = tl.load(addresses + RANKS)
    wait_for_last(OVERLAPS)
    call = tl.load(calls + program) + 1
    turn = call & 1
    if SENDS:
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                memory = memory_of(addresses, peer)
                row = program * RANKS + peer
                while row < num_rows:
                    values = tl.load(x + row.to(tl.int64) * words + place, mask=inside, other=0)
                    there = (turn * RANKS + RANK) * (MAX_ROWS // RANKS) + row // RANKS
                    tl.store(memory + there.to(tl.int64) * MAX_WORDS + place, values, mask=inside)
                    row += step
        raise_flags(addresses, FLAGS + RANK * PROGRAMS + program, call, RANK, RANKS, ASM)
    if ADDS:
        wait_for_flags(addresses, FLAGS + program, call, stop, RANK, RANKS, PROGRAMS, ASM)
        own = memory_of(addresses, RANK)
        row = program * RANKS + RANK
        while row < num_rows:
            low = tl.zeros([BLOCK], dtype=tl.float32)
            high = tl.zeros([BLOCK], dtype=tl.float32)
            for source in tl.static_range(RANKS):
                if source == RANK:
                    part = tl.load(x + row.to(tl.int64) * words + place, mask=inside, other=0)
                else:
                    there = (turn * RANKS + source) * (MAX_ROWS // RANKS) + row // RANKS
                    part = tl.load(
                        own + there.to(tl.int64) * MAX_WORDS + place, mask=inside, other=0, cache_modifier=".cg"
                    )
                first, second = unpack(part, KIND)
                low += first
                high += second
            there = SUMS + (turn * MAX_ROWS + row).to(tl.int64) * MAX_WORDS
            for peer in tl.static_range(RANKS):
                tl.store(memory_of(addresses, peer) + there + place, pack(low, high, KIND), mask=inside)
            row += step
        raise_flags(addresses, FLAGS + (RANKS + RANK) * PROGRAMS + program, call, RANK, RANKS, ASM)
    if RECEIVES:
        own = memory_of(addresses, RANK)
        wait_for_flags(addresses, FLAGS + RANKS * PROGRAMS + program, call, stop, RANK, RANKS, PROGRAMS, ASM)
        for owner in tl.static_range(RANKS):
            row = program * RANKS + owner
            while row < num_rows:
                begin = row.to(tl.int64) * words
                there = SUMS + (turn * MAX_ROWS + row).to(tl.int64) * MAX_WORDS
                received = tl.load(own + there + place, mask=inside, other=0, cache_modifier=".cg")
                low, high = unpack(received, KIND)
                if HAS_RESIDUAL:
                    first, second = unpack(tl.load(residual + begin + place, mask=inside, other=0), KIND)
                    low += first
                    high += second
                tl.store(total + begin + place, pack(low, high, KIND), mask=inside)
                if HAS_NORM:
                    low, high = rounded(low, high, KIND)
                    squares = tl.sum(low * low, 0) + tl.sum(high * high, 0)
                    scale = 1.0 / tl.sqrt_rn(squares / columns + eps)
                    first, second = unpack(tl.load(norm + place, mask=inside, other=0), KIND)
                    tl.store(
                        normed + begin + place, pack(low * scale * first, high * scale * second, KIND), mask=inside
                    )
                row += step
        tl.store(calls + program, call)


@triton.jit
def memory_of(addresses, rank):
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def raise_flags(addresses, flag, call, RANK: tl.constexpr, RANKS: tl.constexpr, ASM: tl.constexpr):
    """Tell this program of every other rank that all that was stored for it is there."""
    tl.debug_barrier()
    if ASM != "":
        call = tl.inline_asm_elementwise(FENCE, "=r,r", [call], dtype=tl.int32, is_pure=False, pack=1)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            memory = tl.load(addresses + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(memory + flag, call, sem="relaxed", scope="sys")


@triton.jit
def wait_for_flags(
    addresses, flag, call, stop, RANK: tl.constexpr, RANKS: tl.constexpr, PROGRAMS: tl.constexpr, ASM: tl.constexpr
):
    """Wait for this program's flags of all other ranks. The kernel fails where the host ends the wait.

    What they tell of is loaded past the first-level cache, which others' stores do not change.
    """
    first = tl.load(addresses + RANK) + 4 * flag.to(tl.int64)
    if ASM != "":
        tl.inline_asm_elementwise(ASM, "=&r,l,r,l", [first, call, stop], dtype=tl.int32, is_pure=False, pack=1)
    else:
        for source in tl.static_range(RANKS):
            if source != RANK:
                place = (first + 4 * PROGRAMS * source).to(tl.pointer_type(tl.int32))
                while tl.load(place, volatile=True) != call:
                    pass
    tl.debug_barrier()
