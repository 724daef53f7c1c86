"""The sampler without a sort against its sorting twin, token for token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stoker.model.kernels import draw
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.sampling import NUMBERS, Adjustments, SampledTokens, SampleRows, SamplingTable
from testing.model.interpreted import Interpreted

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SETTINGS: dict[str, dict[str, tuple[float, ...]]] = {
    "greedy": {"temperature": (0.0,)},
    "temperature": {"temperature": (1.0, 0.6, 0.0, 3.0)},
    "top_k": {"temperature": (1.0,), "top_k": (1, 5, 50, 0, -1, 100000000)},
    "top_p": {"temperature": (0.8, 1.5), "top_p": (0.9, 0.3, 1.0, 0.001, 0.999)},
    "min_p": {"temperature": (1.0, 2.0), "min_p": (0.0, 0.1, 1.0, 0.02)},
    "all": {"temperature": (1.0, 0.0, 0.7), "top_k": (40, 3, 0, 1000), "top_p": (0.95, 0.5, 1.0, 0.8, 0.9),
    "min_p": (0.01, 0.0)},
}  # fmt: skip
PENALTIES: dict[str, tuple[float, ...]] = {
    "presence_penalty": (0.0, 0.7, -0.5),
    "frequency_penalty": (0.0, 0.0, 0.3, 0.0),
    "repetition_penalty": (1.0, 1.3, 0.8, 1.0, 1.0),
}


class Case(NamedTuple):
    """Shape and settings of one comparison."""

    rows: int
    vocab_size: int
    dtype: torch.dtype
    settings: str
    levels: int = 0
    """Number of different values to which logits are rounded (many ties); 0: no rounding."""


def table_for(device: str, seats: int, settings: dict[str, tuple[float, ...]]) -> SamplingTable:
    neutral = {name: 1.0 if name in ("temperature", "top_p", "repetition_penalty") else 0.0 for name in NUMBERS}
    columns = [
        torch.tensor(
            [(settings.get(name) or (neutral[name],))[seat % len(settings.get(name) or (0,))] for seat in range(seats)]
        )
        for name in NUMBERS
    ]  # fmt: skip
    keys = torch.randint(-(2**62), 2**62, (seats, 2))
    keys[:, 1] %= 5
    return SamplingTable(torch.stack(columns, 1).float().to(device), keys.to(device))


def logits_for(case: Case, device: str) -> Tensor:
    logits = torch.randn(case.rows, case.vocab_size) * 3
    if case.levels:
        logits = (logits * case.levels).round() / case.levels
    return logits.to(case.dtype).to(device)


def rows_for(case: Case, device: str, seats: int) -> SampleRows:
    order = torch.randperm(seats)[: case.rows].to(torch.int32)
    filtered = case.settings in ("top_k", "top_p", "min_p", "all")
    return SampleRows(order.to(device), torch.randint(3, 40, (case.rows,), dtype=torch.int32).to(device), filtered)


EDGE = 64
"""Ids that a token may lie from its twin's where a sum rounds differently: the next ones that may be chosen."""


def same_tokens(found: SampledTokens, wanted: SampledTokens, rows: int) -> None:
    """Assert equal tokens; a sum may round differently at a token's edge, in one row of a hundred or one in all."""
    assert torch.equal(found.valid, wanted.valid)
    apart = (found.tokens - wanted.tokens).abs()
    different = int((apart != 0).sum())
    assert different <= max(1, rows // 100), f"{different} of {rows} tokens differ: {found.tokens} {wanted.tokens}"
    assert not bool((apart > EDGE).any()), f"tokens differ by more than an edge: {found.tokens} {wanted.tokens}"


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Draw the same logits and keys in every run."""
    torch.manual_seed(7)


def check_sample(device: str, case: Case) -> None:
    from stoker.model.kernels.fused import sampler

    seats = case.rows + 3
    table = table_for(device, seats, SETTINGS[case.settings])
    logits, rows = logits_for(case, device), rows_for(case, device, seats)
    into, twin_into = (torch.full((seats, 64), -5, dtype=torch.int64, device=device) for _ in range(2))
    found = sampler.sample(logits, rows, table, None, into)
    wanted = draw.sample(logits, rows, table, None, twin_into)
    same_tokens(found, wanted, case.rows)
    assert ((into != -5) == (twin_into != -5)).all()
    assert torch.equal(into[rows.seats.long(), rows.positions.long()], found.tokens)
    unfiltered = replace(rows, filtered=False)
    if not rows.filtered:
        filtered = sampler.sample(logits, replace(rows, filtered=True), table, None, None)
        assert torch.equal(sampler.sample(logits, unfiltered, table, None, None).tokens, filtered.tokens)


def check_one_row_alone(device: str, vocab_size: int) -> None:
    """Check that a row's token does not depend on its batch."""
    from stoker.model.kernels.fused import sampler

    case = Case(7, vocab_size, F32, "all")
    table, logits = table_for(device, 10, SETTINGS["all"]), logits_for(case, device)
    rows = rows_for(case, device, 10)
    whole = sampler.sample(logits, rows, table, None, None).tokens
    for row in range(case.rows):
        alone = SampleRows(rows.seats[row : row + 1], rows.positions[row : row + 1])
        assert sampler.sample(logits[row : row + 1], alone, table, None, None).tokens[0] == whole[row]


def check_adjustments(device: str, rows_number: int, vocab_size: int, dtype: torch.dtype) -> None:
    from stoker.model.kernels.fused import sampler
    from stoker.model.kernels.fused.sampling.adjustment import adjust

    case = Case(rows_number, vocab_size, dtype, "all")
    seats = case.rows + 3
    table = table_for(device, seats, SETTINGS["all"] | PENALTIES)
    logits, rows = logits_for(case, device), rows_for(case, device, seats)
    counts = torch.arange(case.rows) % 4
    tokens = torch.cat([torch.randperm(vocab_size)[: int(count)] for count in counts] or [torch.zeros(0)])
    biases = torch.randn(len(tokens))
    biases[::3] = -float("inf")
    adjustments = Adjustments(
        torch.randint(min(vocab_size, 30), (seats, 50)).to(device),
        torch.randint(1, 20, (seats,), dtype=torch.int32).to(device),
        torch.cat((torch.zeros(1), counts)).cumsum(0).to(torch.int32).to(device),
        tokens.to(torch.int32).to(device),
        biases.to(device),
    )
    kept = logits.clone()
    for penalised in (True, False):
        changed = replace(adjustments, penalised=penalised)
        found = sampler.sample(logits, rows, table, changed, None)
        same_tokens(found, draw.sample(logits, rows, table, changed, None), case.rows)
        if penalised:
            wanted = draw.adjust(logits.float(), rows, table.numbers[rows.seats.long()], changed)
            torch.testing.assert_close(adjust(logits.float(), rows, table, changed), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, kept)


def check_padding_and_broken_rows(device: str) -> None:
    """Check padding and broken rows.

    A row with a nan or without any finite logit is invalid while its neighbours are valid.
    """
    from stoker.model.kernels.fused import sampler

    logits = torch.randn(5, 5000, device=device)
    logits[1, 4321] = float("nan")
    logits[2] = -float("inf")
    seats = torch.tensor([0, 1, 2, -1, 3], dtype=torch.int32, device=device)
    table = table_for(device, 4, SETTINGS["temperature"])
    for filtered in (False, True):
        into = torch.zeros(4, 8, dtype=torch.int64, device=device)
        rows = SampleRows(seats, torch.full((5,), 3, dtype=torch.int32, device=device), filtered)
        found = sampler.sample(logits, rows, table, None, into)
        wanted = draw.sample(logits, rows, table, None, None)
        assert found.valid.tolist() == [True, False, False, True, True]
        for row in (0, 3, 4):
            assert found.tokens[row] == wanted.tokens[row]
        assert found.tokens[3] == 0
        assert not into[:, :3].any()
        assert not into[:, 4:].any()


def check_rows_without_a_limit(device: str, positions: range | tuple[int, ...], vocab_size: int) -> None:
    """Check that rows without a limit draw the same tokens at many positions, whether or not another row has one."""
    from stoker.model.kernels.fused import sampler

    wave_V = torch.arange(vocab_size, dtype=F32).mul_(0.7).sin_().mul_(3)
    wave_V[4000:] += 0.3  # the splits' largest logits differ
    rows = len(positions)
    logits = wave_V.to(device).expand(rows, -1)
    numbers = table_for(device, 1, SETTINGS["temperature"]).numbers
    table = SamplingTable(numbers, torch.ones(1, 2, dtype=torch.int64, device=device))
    seats, places = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0] * rows, positions))
    plain, beside = (sampler.sample(logits, SampleRows(seats, places, it), table, None, None) for it in (False, True))
    assert torch.equal(plain.tokens, beside.tokens), (plain.tokens != beside.tokens).sum()


def check_rows_without_adjustments(device: str, rows: int, vocab_size: int) -> None:
    """Check that a row's tokens do not depend on adjusted logits of another row, which make all of them float32."""
    from stoker.model.kernels.fused import sampler

    logits = torch.randn(1, vocab_size).to(device, BF16).expand(rows, -1)
    table = table_for(device, 1, SETTINGS["temperature"])
    places = torch.arange(rows, dtype=torch.int32, device=device)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    adjustments = Adjustments(
        nothing, nothing, torch.zeros(rows + 1, dtype=torch.int32, device=device), nothing, nothing.float(), False
    )
    asked = SampleRows(torch.zeros_like(places), places, False)
    plain, beside = (sampler.sample(logits, asked, table, it, None).tokens for it in (None, adjustments))
    assert torch.equal(plain, beside), (plain != beside).sum()


def check_many_small_weights(device: str) -> None:
    """Check that top-p counts the rest of top-k, including logits so small that top-p takes none of them."""
    from stoker.model.kernels.fused import sampler

    torch.manual_seed(0)
    logits = torch.full((100, 1000), 4.9e-5).log_().to(device)
    logits[:, 7], logits[:, 3] = 0.0, torch.tensor(0.09).log()
    table = table_for(device, 100, {"top_k": (999,), "top_p": (0.9,)})
    places = torch.arange(100, dtype=torch.int32, device=device)
    found, wanted = (
        sample(logits, SampleRows(places, places), table, None, None) for sample in (sampler.sample, draw.sample)
    )
    assert set(wanted.tokens.tolist()) == {3, 7}
    same_tokens(found, wanted, 100)


def check_few_finite_logits(device: str, vocab_size: int, dtype: torch.dtype) -> None:
    """Check rows with fewer allowed tokens than top-k."""
    from stoker.model.kernels.fused import sampler

    for name in SETTINGS:
        case = Case(12, vocab_size, dtype, name)
        table, rows = table_for(device, 15, SETTINGS[name]), rows_for(case, device, 15)
        logits = torch.full((12, vocab_size), -float("inf"))
        logits.scatter_(1, torch.randint(vocab_size, (12, 4)), torch.randn(12, 4))
        logits = logits.to(dtype).to(device)
        found = sampler.sample(logits, rows, table, None, None)
        same_tokens(found, draw.sample(logits, rows, table, None, None), case.rows)


def peaked(rows: int, vocab_size: int) -> Tensor:
    """Return logits like a language model's: probabilities fall with the power 1.5 of the rank, entropy 3.2 nats."""
    return torch.arange(1, vocab_size + 1).log().mul(-1.5).expand(rows, -1).gather(1, shuffled(rows, vocab_size))


def shuffled(rows: int, vocab_size: int) -> Tensor:
    return torch.rand(rows, vocab_size).argsort(1)


SHAPES: dict[str, Callable[[int, int], Tensor]] = {
    "flat": lambda rows, vocab_size: torch.randn(rows, vocab_size) * 3 + 20,
    "peaked": peaked,
    "close": lambda rows, vocab_size: torch.randn(rows, vocab_size) * 1e-4 - 5,
    "crowded": lambda rows, vocab_size: torch.randn(rows, vocab_size) - 12 * (torch.arange(vocab_size) > 3000),
    "few levels": lambda rows, vocab_size: torch.randn(rows, vocab_size).round(),
    "below -0": lambda rows, vocab_size: (
        torch.randn(rows, vocab_size).mul(-3).abs().neg().index_fill(1, torch.tensor([3]), -0.0)
    ),
    "an outlier": lambda rows, vocab_size: (
        torch.randn(rows, vocab_size).index_fill(1, torch.tensor([vocab_size // 2]), 9.0)
    ),
    "mostly banned": lambda rows, vocab_size: (
        torch.randn(rows, vocab_size).masked_fill(torch.arange(vocab_size) % 9 > 0, -float("inf"))
    ),
}  # fmt: skip
"""Distributions of logits: they take different ways to their limit."""
LIMITS: dict[str, tuple[float, ...]] = {
    "temperature": (1.0, 0.7, 1.5, 1.0, 0.3),
    "top_k": (0, 0, 0, 7, 50, 1000, 5000, 3000, 20, 0),
    "top_p": (0.9, 0.5, 0.999, 1.0, 0.95, 1.0, 1.0, 0.8, 0.1, 1.0, 0.9),
    "min_p": (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.2),
}


BOTH_LIMITS: dict[str, tuple[float, ...]] = {
    "temperature": (0.002, 0.01, 0.05),
    "top_k": (270.0, 280.0),
    "top_p": (0.02, 0.9, 0.5),
}
"""Top-k leaves too many for the row's own program, and each of them counts for top-p."""


def check_limits(
    device: str, shape: str, rows: int, vocab_size: int, limits: dict[str, tuple[float, ...]] = LIMITS
) -> None:
    """Check the limit itself, not only the drawn token.

    As many tokens are left as by sorting, each split's sum is theirs, and no bit depends on the number of rows.
    """
    from stoker.model.kernels.fused.sampling.limits import apply_limits
    from stoker.model.kernels.fused.sampling.scan import SPLIT, make_scan, sum_splits

    logits = SHAPES[shape](rows, vocab_size).float().to(device)
    table = table_for(device, rows, limits)
    places = torch.arange(rows, dtype=torch.int32, device=device)
    scan, alone = (make_scan(logits[:count], SampleRows(places[:count], places[:count]), table) for count in (rows, 7))
    for one in (scan, alone):
        sum_splits(one)
        apply_limits(one)
    assert torch.equal(alone.thresholds, scan.thresholds[:7])
    assert torch.equal(alone.totals, scan.totals[:7])
    sharpness_B1 = 1 / table.numbers[:, :1]
    scaled_BV = (logits - logits.amax(1, keepdim=True)) * sharpness_B1
    wanted = (scaled_BV >= draw.threshold(scaled_BV, table.numbers)).sum(1)
    kept_BV = logits >= scan.thresholds.unsqueeze(1)
    found = kept_BV.sum(1)
    wrong = (found - wanted).abs() > wanted // 1000  # sums are rounded in another way
    assert not wrong.any(), f"{shape}: {found[wrong]} instead of {wanted[wrong]} in rows {wrong.nonzero().flatten()}"
    weights_BV = (scaled_BV.double().exp() * kept_BV)[scan.thresholds > -float("inf")]
    padded = torch.nn.functional.pad(weights_BV, (0, scan.splits * SPLIT - vocab_size))
    sums = scan.totals[scan.thresholds > -float("inf")]
    torch.testing.assert_close(sums, padded.unflatten(1, (scan.splits, SPLIT)).sum(-1), rtol=1e-4, atol=1e-9)


EDGES = (20257, 58721, 147288, 192044, 250224, 278351, 340781)
"""Positions whose random number lies where sums that are rounded in different ways choose different tokens."""
CASES = [
    *(Case(rows, vocab, F32, name) for rows, vocab in ((1, 100), (9, 4096), (300, 5001)) for name in SETTINGS),
    *(Case(64, 128256, dtype, name) for dtype in (F32, BF16) for name in SETTINGS),
    *(Case(33, 151936, BF16, name, 4) for name in ("top_k", "top_p", "all")),
    Case(20, 7000, F16, "all"),
    Case(20, 7000, F32, "all", 8),
    Case(40, 128256, BF16, "all", 1),
    Case(0, 100, F32, "temperature"),
]
SMALL = [Case(rows, vocab, F32, name) for rows, vocab in ((4, 50),) for name in SETTINGS] + [Case(2, 4500, F32, "all")]
SMALL_TIES = [
    Case(6, 300, F32, "all", 2),
    Case(6, 4500, BF16, "all", 1),
    Case(0, 20, F32, "temperature"),
    Case(1, 1, F32, "all"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_agree(case: Case) -> None:
    check_sample("cuda", case)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [5000, 40000, 128256, 151936])
@pytest.mark.parametrize("shape", SHAPES)
def test_limits_agree(shape: str, vocab_size: int) -> None:
    check_limits("cuda", shape, 110, vocab_size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("vocab_size", [100, 9000])
def test_tokens_agree_where_few_are_allowed(vocab_size: int, dtype: torch.dtype) -> None:
    check_few_finite_logits("cuda", vocab_size, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [1000, 128256])
def test_a_token_does_not_depend_on_the_batch(vocab_size: int) -> None:
    check_one_row_alone("cuda", vocab_size)


@pytest.mark.gpu
def test_a_token_does_not_depend_on_the_limits_of_other_rows() -> None:
    check_rows_without_a_limit("cuda", range(20000), 32000)


@pytest.mark.gpu
def test_a_token_does_not_depend_on_the_adjustments_of_other_rows() -> None:
    check_rows_without_adjustments("cuda", 8000, 32000)


@pytest.mark.gpu
def test_small_weights_count_for_top_p() -> None:
    check_many_small_weights("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 50), (8, 4097), (40, 128256)])
def test_adjusted_tokens_agree(rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    check_adjustments("cuda", rows, vocab_size, dtype)


@pytest.mark.gpu
def test_padding_and_broken_rows_stay_alone() -> None:
    check_padding_and_broken_rows("cuda")


@pytest.mark.gpu
def test_a_captured_step_reads_new_values() -> None:
    ops = Ops("fused")
    table = table_for("cuda", 8, SETTINGS["all"])
    seats, positions = (torch.arange(8, dtype=torch.int32, device="cuda") for _ in range(2))
    rows = SampleRows(seats, positions)
    logits = torch.randn(8, 128256, device="cuda", dtype=BF16)
    ops.sample(logits, rows, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.sample(logits, rows, table)
    for _ in range(3):
        logits.normal_()
        table.numbers.copy_(table.numbers.roll(1, 0))
        rows.positions.add_(1)
        graph.replay()
        assert torch.equal(captured.tokens, ops.sample(logits, rows, table).tokens)


def test_sampling_agrees_when_interpreted(interpreted: Interpreted) -> None:
    cases = [(check_sample, ("cpu", case)) for case in (*SMALL, *SMALL_TIES)]
    others: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
        (check_padding_and_broken_rows, ("cpu",)),
        (check_one_row_alone, ("cpu", 300)),
        (check_few_finite_logits, ("cpu", 100, F32)),
        (check_many_small_weights, ("cpu",)),
        (check_rows_without_a_limit, ("cpu", EDGES, 8192)),
        (check_rows_without_adjustments, ("cpu", 3, 50)),
    ]
    interpreted.run([*cases, *others, (check_adjustments, ("cpu", 9, 60, F32))])


def test_limits_agree_when_interpreted(interpreted: Interpreted) -> None:
    interpreted.run(
        [(check_limits, ("cpu", shape, 12, 36000)) for shape in ("flat", "peaked", "crowded", "few levels")]
    )


def test_the_twin_repeats_and_differs_between_choices() -> None:
    table = table_for("cpu", 2, SETTINGS["temperature"])
    logits = torch.randn(1, 1000).expand(64, -1)
    rows = SampleRows(torch.zeros(64, dtype=torch.int32), torch.arange(64, dtype=torch.int32))
    first, second = (Ops().sample(logits, rows, table).tokens for _ in range(2))
    assert torch.equal(first, second)
    assert len(set(first.tolist())) > 32
    table.keys[0, 1] += 1
    assert not torch.equal(first, Ops().sample(logits, rows, table).tokens)
