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
CHECKED = 2**18
"""Looks at an inbox between two at the word that ends all waiting: some 0.2 s. The word lies in the host's
memory, where one look of all threads of 64 programs takes 25 ms, of 128 programs 40."""
VECTOR_WORDS = 2
"""Words that one instruction moves: rows in the inboxes begin at multiples of them."""
FEW_RANKS = 4
"""With more, a thread has registers for one word of each at a time."""
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
    warps = warps_of(block)
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
        **asm_of(pack_of(block, warps, inboxes.ranks), inboxes.rank, inboxes.ranks),
        BLOCK=block,
        enable_fp_fusion=False,
        num_warps=warps,
        **overlap(),
    )
    return total_TD, normed_TD


def as_words(x: Tensor) -> Tensor:
    return x if x.dtype is torch.int32 else x.view(torch.int32)


def warps_of(block: int) -> int:
    """As many threads as let each move two words of a row, so that none is moved to another thread in between."""
    return min(32, max(1, block // 32 // VECTOR_WORDS))


def pack_of(block: int, warps: int, ranks: int) -> int:
    """Return the number of each rank's words that a thread waits for at once, for which it has the registers.

    0 in the interpreter, which knows no assembly.
    """
    if triton.knobs.runtime.interpret:
        return 0
    return 1 if ranks > FEW_RANKS else min(VECTOR_WORDS, max(1, block // 32 // warps))


def asm_of(pack: int, rank: int, ranks: int) -> dict[str, int | str]:
    """Return the kernel's constants for the wait: a thread's words of all other ranks are on their way at a time.

    Operands: `pack` values of each other rank, then `pack` of each of these: addresses of rank 0's words, bytes from
    one rank's words to the next one's, the number of the call, the address of the word that ends all waiting.
    """
    if not pack:
        return {"PACK": 0, "ASM": "", "CONSTRAINTS": ""}
    others = [source for source in range(ranks) if source != rank]
    first = pack * len(others)
    addresses, apart, call, stop = (
        [f"${first + place}" for place in range(pack)],
        *(f"${first + pack * kind}" for kind in (1, 2, 3)),
    )
    places = " ".join(place_words(source, addresses, apart) for source in others)
    values = [f"${place}" for place in range(first)]
    looks = " ".join(
        look_at(source, values[pack * number : pack * (number + 1)]) for number, source in enumerate(others)
    )
    names = [f"{source}_{place}" for source in others for place in range(pack)]
    checks = " ".join(f"setp.ne.u32 m, f{name}, {call}; @m bra AGAIN;" for name in names)
    asm = f"""{{
        .reg .pred m, beside;
        .reg .b32 {", ".join(f"f{name}" for name in names)}, spins, word;
        .reg .b64 {", ".join(f"at{name}" for name in names)}, gap;
        {places}
        sub.u64 gap, {addresses[-1]}, {addresses[0]};
        setp.eq.u64 beside, gap, 8;
        mov.u32 spins, 0;
        LOOK: {looks}
        {checks}
        bra DONE;
        AGAIN: add.u32 spins, spins, 1;
        and.b32 word, spins, {CHECKED - 1};
        setp.ne.u32 m, word, 0;
        @m bra LOOK;
        ld.volatile.global.u32 word, [{stop}];
        setp.ne.u32 m, word, 0;
        @m trap;
        setp.ge.u32 m, spins, {SPINS};
        @m trap;
        bra LOOK;
        DONE:
    }}"""
    constraints = ["=&r"] * first + [kind for kind in ("l", "l", "r", "l", "r") for _ in range(pack)]
    return {"PACK": pack, "ASM": asm, "CONSTRAINTS": ",".join(constraints)}


def place_words(source: int, addresses: list[str], apart: str) -> str:
    """Compute the addresses of a rank's words."""
    return " ".join(f"mad.lo.u64 at{source}_{place}, {apart}, {source}, {at};" for place, at in enumerate(addresses))


def look_at(source: int, values: list[str]) -> str:
    """Load a rank's words, each a value and a flag; two that lie side by side at once."""
    pairs = [f"{value}, f{source}_{place}" for place, value in enumerate(values)]
    looks = [f"ld.volatile.global.v2.u32 {{{pair}}}, [at{source}_{place}];" for place, pair in enumerate(pairs)]
    if len(values) == 1:
        return looks[0]
    both = f"@beside ld.volatile.global.v4.u32 {{{', '.join(pairs)}}}, [at{source}_0];"
    return " ".join([both, *(f"@!beside {look}" for look in looks)])


@triton.constexpr_function
def int32s(number: int) -> tuple[tl.dtype, ...]:
    return (tl.int32,) * number


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
    wait_for_last(OVERLAPS)
    call = tl.load(calls + program) + 1
    turn = (call & 1) * RANKS
    row = program
    if SENDS:
        while row < num_rows:
            values = tl.load(x + row.to(tl.int64) * words + place, mask=inside, other=0)
            packed = (call.to(tl.int64) << 32) | (values.to(tl.int64) & 0xFFFFFFFF)
            begin = ((turn + RANK) * MAX_ROWS + row).to(tl.int64) * max_words
            for peer in tl.static_range(RANKS):
                if peer != RANK:
                    tl.store(memory_of(addresses[peer], tl.int64) + begin + place, packed, mask=inside)
            row += tl.num_programs(0)
    if RECEIVES:
        if HAS_NORM:
            first_gain, second_gain = unpack(tl.load(norm + place, mask=inside, other=0), KIND)
        row = program
        while row < num_rows:
            begin = row.to(tl.int64) * words
            own = tl.load(x + begin + place, mask=inside, other=0)
            if HAS_RESIDUAL:
                before = tl.load(residual + begin + place, mask=inside, other=0)
            there = (turn * MAX_ROWS + row).to(tl.int64) * max_words
            # words behind the row's end are looked for at its last one
            words_at = memory_of(addresses[RANK], tl.int64) + there + tl.minimum(place, words - 1)
            others = receive(
                words_at, own, MAX_ROWS * max_words, call, addresses[RANKS], RANK, RANKS, PACK, ASM, CONSTRAINTS
            )
            low = tl.zeros([BLOCK], dtype=tl.float32)
            high = tl.zeros([BLOCK], dtype=tl.float32)
            for source in tl.static_range(RANKS):
                if source == RANK:
                    first, second = unpack(own, KIND)
                else:
                    first, second = unpack(tl.where(inside, others[source - (source > RANK)], 0), KIND)
                low += first
                high += second
            if HAS_RESIDUAL:
                low, high = rounded(low, high, KIND)
                first, second = unpack(before, KIND)
                low += first
                high += second
            tl.store(total + begin + place, pack(low, high, KIND), mask=inside)
            if HAS_NORM:
                values = normalised(low, high, first_gain, second_gain, columns, eps, KIND)
                tl.store(normed + begin + place, values, mask=inside)
            row += tl.num_programs(0)
        tl.store(calls + program, call)


@triton.jit
def receive(
    words_at, own, apart, call, stop,
    RANK: tl.constexpr, RANKS: tl.constexpr, PACK: tl.constexpr, ASM: tl.constexpr, CONSTRAINTS: tl.constexpr,
):  # fmt: skip
    """Wait for a row's words of all other ranks that carry the number of this call, and return their values.

    Each thread waits for its own words; in the interpreter (PACK 0) all wait together. The kernel fails where the host
    ends the wait. `own` is this rank's row: it is not read, but gives the assembly the layout of what is loaded,
    without which Triton repeats the wait for each layout of its results.
    """
    if PACK > 0:
        arguments = [words_at.to(tl.int64), (8 * apart).to(tl.int64), call, stop, own]
        found = tl.inline_asm_elementwise(
            ASM, CONSTRAINTS, arguments, dtype=int32s(RANKS - 1), is_pure=False, pack=PACK
        )
    else:
        found = ()
        for source in tl.static_range(RANKS):
            if source != RANK:
                packed = tl.load(words_at + source * apart, volatile=True)
                while tl.sum(((packed >> 32).to(tl.int32) != call).to(tl.int32), 0) > 0:
                    packed = tl.load(words_at + source * apart, volatile=True)
                found += (packed.to(tl.int32),)
    return found


@triton.jit
def memory_of(address, WORD: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(WORD)), 16)


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


@triton.jit
def normalised(low, high, first_gain, second_gain, columns, eps, KIND: tl.constexpr):
    """The words of a row that is stored, divided by its root mean square and times the norm's weights."""
    low, high = rounded(low, high, KIND)
    squares = tl.sum(low * low + high * high, 0)
    scale = 1.0 / tl.sqrt_rn(squares / columns + eps)
    return pack(low * scale * first_gain, high * scale * second_gain, KIND)
