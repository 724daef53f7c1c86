"""Two-shot sums over the GPUs of one host: each rank adds some of the rows and stores them in the others' memory.

For messages too long for `peer_sum`, where every rank sends all of its rows to all others. Here row r belongs to rank
r % R: the others store their parts of it there (first shot), it adds them and stores the sum everywhere (second shot).
So a rank sends 2 (R - 1) / R times its bytes, as few as any all-reduce needs, and the norm that follows is part of the
same kernel.

Program p sends rows p, p + P, ... to rank p % R, and in the end receives their sums. R programs that follow each other,
a group, share the rows that belong to this rank: each adds one part of their columns. So a program has one row of each
shot in flight where there are as many rows as programs.

Rows travel as they are. Behind them and a fence a program stores the number of the call into a flag on the rank that
waits for it: one for the rows that it sent, then one on every rank for what it added. A group waits for the same group
of every other rank and for no other, in every call, rows or not, so none can be a whole call ahead of another; two
turns of memory are enough. Each program counts its own calls, those of a group alike, so calls of any numbers of rows
follow each other, in graphs or not. All ranks make the same calls in the same order.

The ranks' parts are added in the order of ranks in float32 and rounded once: the bits of `peer_sum`, on every rank.

T rows, R ranks, P programs, W words of a row (4 bytes: one float32, or two values of 2 bytes).

Called by the engine's `peer_sums`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.model.kernels.fused.launch import overlap, wait_for_last
from stoker.model.kernels.fused.peer_memory import KINDS, WORD_BYTES, PeerMemory
from stoker.model.kernels.fused.peer_sum import CHECKED, SPINS, as_words, memory_of, normalised, pack, unpack

PROGRAMS = 256
"""At most as many as run at once, two for each multiprocessor."""
VECTOR_WORDS = 4
"""Words that one instruction moves: rows in the memory begin at multiples of them."""


def programs_of(ranks: int) -> int:
    """Return the largest number of programs: whole groups."""
    return PROGRAMS // ranks * ranks


def memory_words(ranks: int, max_rows: int, max_words: int) -> int:
    """Return the length of a rank's memory, in words of 4 bytes.

    It is int32: parts [2, ranks, own rows, max_words], sums [2, max_rows, max_words], flags [2, ranks, programs].
    """
    return 4 * max_rows * max_words + 2 * ranks * programs_of(ranks)


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
    share = round_up(triton.cdiv(words, memory.ranks), VECTOR_WORDS)
    programs = min(round_up(x_TD.shape[0], memory.ranks), programs_of(memory.ranks))
    asm = not triton.knobs.runtime.interpret
    two_shot_kernel[(programs,)](
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
        PROGRAMS=programs_of(memory.ranks),
        KIND=KINDS[x_TD.dtype],
        HAS_RESIDUAL=residual_TD is not None,
        HAS_NORM=norm_D is not None,
        SENDS=only in (None, "send"),
        ADDS=only in (None, "add"),
        RECEIVES=only in (None, "receive"),
        PARTS_ASM=wait_asm(others_of(memory), 4 * programs_of(memory.ranks)) if asm else "",
        SUMS_ASM=wait_asm(range(memory.ranks), 4) if asm else "",
        BLOCK=block,
        SHARE=share,
        SHARE_BLOCK=triton.next_power_of_2(share),
        enable_fp_fusion=False,
        num_warps=warps_of(block),
        **overlap(),
    )
    return total_TD, normed_TD


def warps_of(block: int) -> int:
    return min(16, max(1, block // 256))


def others_of(memory: PeerMemory) -> list[int]:
    return [rank for rank in range(memory.ranks) if rank != memory.rank]


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def wait_asm(places: Sequence[int], apart: int) -> str:
    """Return the wait for some of the flags that lie `apart` bytes from each other; all are looked at at a time.

    Operands: the value seen last, the address of flag 0, the number of the call, the address of the word that ends all
    waiting.
    """
    names = ", ".join(f"f{place}" for place in places)
    looks = " ".join(f"ld.relaxed.sys.global.u32 f{place}, [$1+{apart * place}];" for place in places)
    checks = " ".join(f"setp.ne.u32 m, f{place}, $2; @m bra AGAIN;" for place in places)
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
        DONE: mov.u32 $0, f{places[-1]};
    }}"""


FENCE = tl.constexpr("""{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first fence.acq_rel.sys;
    mov.u32 $0, $1;
}""")
"""What all threads have stored, behind a barrier, is there before a flag that the first of them stores."""


@triton.jit(do_not_specialize=["num_rows"])
def two_shot_kernel(
    x, residual, norm, total, normed, addresses, calls, num_rows, words, columns, eps,
    RANK: tl.constexpr, RANKS: tl.constexpr, MAX_ROWS: tl.constexpr, MAX_WORDS: tl.constexpr, PROGRAMS: tl.constexpr,
    KIND: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    SENDS: tl.constexpr, ADDS: tl.constexpr, RECEIVES: tl.constexpr, PARTS_ASM: tl.constexpr, SUMS_ASM: tl.constexpr,
    BLOCK: tl.constexpr, SHARE: tl.constexpr, SHARE_BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    step = tl.num_programs(0)
    owner = program % RANKS
    group = program - owner
    place = tl.arange(0, BLOCK)
    inside = place < words
    SUMS: tl.constexpr = 2 * MAX_ROWS * MAX_WORDS
    PART_FLAGS: tl.constexpr = 2 * SUMS
    SUM_FLAGS: tl.constexpr = PART_FLAGS + RANKS * PROGRAMS
    own = memory_of(addresses[RANK], tl.int32)
    wait_for_last(OVERLAPS)
    call = tl.load(calls + program) + 1
    turn = call & 1
    if SENDS:
        target = addresses[0]
        for peer in tl.static_range(1, RANKS):
            target = tl.where(owner == peer, addresses[peer], target)
        memory = memory_of(target, tl.int32)
        row = tl.where(owner == RANK, num_rows, program)  # what belongs to this rank stays where it is
        while row < num_rows:
            values = tl.load(x + row.to(tl.int64) * words + place, mask=inside, other=0)
            there = (turn * RANKS + RANK) * (MAX_ROWS // RANKS) + row // RANKS
            tl.store(memory + there.to(tl.int64) * MAX_WORDS + place, values, mask=inside)
            row += step
        call = fence(call, PARTS_ASM != "")
        raise_flag(memory + PART_FLAGS + RANK * PROGRAMS + program, call)
    if ADDS:
        wait_for_flags(own + PART_FLAGS + group + RANK, call, addresses[RANKS], RANK, RANKS, PROGRAMS, PARTS_ASM)
        of_share = owner * SHARE + tl.arange(0, SHARE_BLOCK)
        shared = (tl.arange(0, SHARE_BLOCK) < SHARE) & (of_share < words)
        row = group + RANK
        while row < num_rows:
            low = tl.zeros([SHARE_BLOCK], dtype=tl.float32)
            high = tl.zeros([SHARE_BLOCK], dtype=tl.float32)
            for source in tl.static_range(RANKS):
                if source == RANK:
                    part = tl.load(x + row.to(tl.int64) * words + of_share, mask=shared, other=0)
                else:
                    there = (turn * RANKS + source) * (MAX_ROWS // RANKS) + row // RANKS
                    part = tl.load(
                        own + there.to(tl.int64) * MAX_WORDS + of_share, mask=shared, other=0, cache_modifier=".cg"
                    )
                first, second = unpack(part, KIND)
                low += first
                high += second
            there = SUMS + (turn * MAX_ROWS + row).to(tl.int64) * MAX_WORDS
            for peer in tl.static_range(RANKS):
                tl.store(memory_of(addresses[peer], tl.int32) + there + of_share, pack(low, high, KIND), mask=shared)
            row += step
        call = fence(call, PARTS_ASM != "")
        for peer in tl.static_range(RANKS):
            raise_flag(memory_of(addresses[peer], tl.int32) + SUM_FLAGS + RANK * PROGRAMS + program, call)
    if RECEIVES:
        row = program
        if HAS_NORM:
            first_gain, second_gain = unpack(tl.load(norm + place, mask=inside, other=0), KIND)
        if HAS_RESIDUAL:
            before = row_of(residual, row, num_rows, words, place)
        wait_for_flags(own + SUM_FLAGS + owner * PROGRAMS + group, call, addresses[RANKS], -1, RANKS, 1, SUMS_ASM)
        while row < num_rows:
            begin = row.to(tl.int64) * words
            there = SUMS + (turn * MAX_ROWS + row).to(tl.int64) * MAX_WORDS
            received = tl.load(own + there + place, mask=inside, other=0, cache_modifier=".cg")
            low, high = unpack(received, KIND)
            if HAS_RESIDUAL:
                first, second = unpack(before, KIND)
                low += first
                high += second
            tl.store(total + begin + place, pack(low, high, KIND), mask=inside)
            if HAS_NORM:
                values = normalised(low, high, first_gain, second_gain, columns, eps, KIND)
                tl.store(normed + begin + place, values, mask=inside)
            row += step
            if HAS_RESIDUAL:
                before = row_of(residual, row, num_rows, words, place)
        tl.store(calls + program, call)


@triton.jit
def row_of(values, row, num_rows, words, place):
    """A row, zeros behind the last one."""
    inside = place < tl.where(row < num_rows, words, 0)
    return tl.load(values + row.to(tl.int64) * words + place, mask=inside, other=0)


@triton.jit
def fence(call, COMPILED: tl.constexpr):
    """Return the number of the call, once all that this program has stored is where it belongs."""
    tl.debug_barrier()
    if COMPILED:
        call = tl.inline_asm_elementwise(FENCE, "=r,r", [call], dtype=tl.int32, is_pure=False, pack=1)
    return call


@triton.jit
def raise_flag(flag, call):
    tl.atomic_xchg(flag, call, sem="relaxed", scope="sys")


@triton.jit
def wait_for_flags(first, call, stop, RANK: tl.constexpr, RANKS: tl.constexpr, APART: tl.constexpr, ASM: tl.constexpr):
    """Wait for one flag of each rank but RANK. The kernel fails where the host ends the wait.

    What they tell of is loaded past the first-level cache, which others' stores do not change.
    """
    if ASM != "":
        tl.inline_asm_elementwise(
            ASM, "=&r,l,r,l", [first.to(tl.int64), call, stop], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        for source in tl.static_range(RANKS):
            if source != RANK:
                while tl.load(first + APART * source, volatile=True) != call:
                    pass
    tl.debug_barrier()
