"""Two ranks of tensor parallelism against one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.spawn import spawn

from stoker.engine.execution.dealt_draw import collected
from stoker.model.attend import PackedAttend
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder, PartOfPass
from stoker.model.group_sums import GroupSums
from stoker.model.kernels.fp8 import Cut, Fp8Weight, Recipe, set_fp8
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.sampling import SampledTokens
from stoker.model.overlapped_products import gather_linear, linear_scatter
from stoker.model.paged_attend import KVCache, PagedAttend, PagedBatch, PagedSize
from stoker.model.parallel import ColumnParallelLinear, RowParallelLinear
from stoker.model.parameter import Section
from stoker.model.tensor_group import gather_tokens, group_rank, group_size, row_share, scatter_tokens
from testing.model.leave import leave

RECIPES: tuple[Recipe, ...] = ("Tensorwise", "Rowwise")
TOKENS = torch.arange(24) * 7 % 96
POSITIONS = torch.cat((torch.arange(14), torch.arange(10)))
BOUNDS = torch.tensor([0, 14, 24])
WEIGHTS = (torch.arange(24) % 4 > 0).float()


def run_pass(decoder: Decoder) -> dict[str, Any]:
    """Return logits, loss and this rank's gradients."""
    hidden = decoder(TOKENS, POSITIONS, PackedAttend(decoder.ops, "auto", BOUNDS))
    result = decoder.cross_entropy(hidden, TOKENS.roll(-1), WEIGHTS)
    result.loss_sum.backward()
    gradients = {}
    for part in decoder.named_parts():
        assert part.parameter.grad is not None
        gradient = part.parameter.grad[part.row_start : part.row_end].clone()
        gradients[part.hf_name] = (part.start, part.size, part.shard_dim is None, gradient)
    return {
        "logits": decoder.logits(hidden).detach(),
        "loss": result.loss_sum.item(),
        "logprobs": result.logprobs,
        "gradients": gradients,
    }


def serve(decoder: Decoder, cut: int | None = None) -> torch.Tensor:
    """Return the logits of the first sequence through a cache of this rank's heads; `cut`: in two parts of one pass."""
    cache = KVCache(decoder.config, num_blocks=4, block_size=8, dtype=torch.float32, group=decoder.group)
    parts = []
    with torch.inference_mode():
        for begin, end in ((0, 14),) if cut is None else ((0, cut), (cut, 14)):
            attend = PagedAttend(decoder.ops, "auto", cache, PagedSize(max_tokens=32, max_sequences=1, max_blocks=4))
            numbers = {"query_start": [0, end - begin], "seq_lens": [end], "slot_mapping": list(range(begin, end))}
            fields: dict[str, Any] = {name: torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()}
            table = torch.tensor([[0, 1]], dtype=torch.int32)
            attend.prepare(PagedBatch(**fields, block_tables=table, num_tokens=end - begin))
            parts.append(PartOfPass(TOKENS[begin:end], POSITIONS[begin:end], attend))
        return decoder.logits(decoder(*parts[0]) if cut is None else decoder.in_parts(parts))


def layers_in_eight_bits(recipe: Recipe, group: ProcessGroup | None) -> list[tuple[torch.Tensor, int | None]]:
    """Return results and gradients of two layers of which each rank holds a part; with the dim that is cut."""
    made: Any = {"bias": False, "dtype": torch.float32, "device": torch.device("cpu"), "group": group}
    column = ColumnParallelLinear([Section("a", 64)], 32, Ops(), **made)
    row = RowParallelLinear(Section("b", 32), 64, Ops(), **made)
    size, rank = group_size(group), group_rank(group)
    random = torch.Generator().manual_seed(3)
    wide = torch.randn(64, 32, generator=random) * torch.logspace(-2, 1, 64)[:, None]
    deep = torch.randn(32, 64, generator=random) * torch.logspace(-2, 1, 64)
    cuts: tuple[Cut, Cut] = ("rows", "columns")
    for layer, whole, dim, cut in zip((column, row), (wide, deep), (0, 1), cuts, strict=True):
        layer.weight = nn.Parameter(whole.chunk(size, dim)[rank].clone())
        set_fp8(layer.weight, Fp8Weight(recipe, group, None if group is None else cut))
    x = torch.randn(20, 32, generator=random).requires_grad_()
    middle = column(x)
    y = row(middle)
    gradients = torch.autograd.grad(y, (x, column.weight, row.weight), torch.randn(20, 32, generator=random))
    values = (middle, y, *gradients)
    return [(value.detach(), dim) for value, dim in zip(values, (1, None, None, 0, 1), strict=True)]


def overlapped_differences(group: ProcessGroup | None) -> list[float]:
    """Return how far results and gradients of both overlapped products are from those of their two steps."""
    assert group is not None
    found = []
    for tokens in (5, 1):  # of each rank: the parts of a product are of different sizes
        x_tD, weight_ED = torch.randn(tokens, 6), torch.randn(4, 6)
        x_TD = gather_tokens(torch.randn(tokens, 6), group)
        for inputs, overlapped, steps in (
            (x_tD, partial(gather_linear, ops=Ops()), lambda x, w, g: F.linear(gather_tokens(x, g), w)),
            (x_TD, linear_scatter, lambda x, w, g: scatter_tokens(F.linear(x, w), g)),
        ):
            values = []
            for product in (overlapped, steps):
                x, weight = inputs.clone().requires_grad_(), weight_ED.clone().requires_grad_()
                y = product(x, weight, group)
                torch.manual_seed(7)
                values.append((y, *torch.autograd.grad(y, (x, weight), torch.randn_like(y))))
            found += [float((a - b).abs().max()) for a, b in zip(*values, strict=True)]
    return found


def work(rank: int, folder: str, config: ModelConfig) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for sequence_parallel in (False, True):
        decoder = Decoder(config, Ops(), group=dist.group.WORLD, sequence_parallel=sequence_parallel)
        decoder.init_weights(5)
        served = {} if sequence_parallel else {"served": serve(decoder)}
        torch.save(run_pass(decoder) | served, f"{folder}/{rank}-{sequence_parallel}.pt")
    for recipe in RECIPES:
        torch.save(layers_in_eight_bits(recipe, dist.group.WORLD), f"{folder}/{rank}-{recipe}.pt")
    assert max(overlapped_differences(dist.group.WORLD)) < 1e-5
    with pytest.raises(ValueError, match="tokens: 13 cannot be cut over tensor parallel size 2: 13 % 2 = 1"):
        decoder.embed(TOKENS[:13])
    leave()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_two_ranks_give_the_logits_and_gradients_of_one(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config: ModelConfig = request.getfixturevalue(name)
    config = (
        replace(config, vocab_size=95) if name == "llama" else config
    )  # the second rank has fewer rows of the table
    one = Decoder(config, Ops())
    one.init_weights(5)
    expected = run_pass(one)
    spawn(work, (str(tmp_path), config), nprocs=2)
    for sequence_parallel in (False, True):
        ranks = [torch.load(tmp_path / f"{rank}-{sequence_parallel}.pt") for rank in range(2)]
        for result in ranks:
            assert_same_values(result, expected)
        assert_same_gradients([result["gradients"] for result in ranks], expected["gradients"])

    for recipe in RECIPES:
        found = [torch.load(tmp_path / f"{rank}-{recipe}.pt") for rank in range(2)]
        for parts, (whole, dim) in zip(zip(*found, strict=True), layers_in_eight_bits(recipe, None), strict=True):
            joined = [part[0] for part in parts][:1] if dim is None else [torch.cat([part[0] for part in parts], dim)]
            assert (joined[0] - whole).norm() / whole.norm() < 2e-3, "each rank has the scales of the whole"


@pytest.mark.parametrize(
    ("total", "ranks", "rows"),
    [
        (96, 1, [96]),
        (95, 1, [95]),
        (96, 4, [24, 24, 24, 24]),
        (95, 2, [64, 31]),
        (67, 4, [17, 17, 17, 16]),
        (32003, 2, [16064, 15939]),
        (32003, 4, [8064, 8064, 8064, 7811]),
        (9, 4, [3, 3, 3, 0]),
    ],
)
def test_rows_of_a_table_are_cut_evenly_or_the_last_rank_has_fewer(total: int, ranks: int, rows: list[int]) -> None:
    if 0 in rows:
        with pytest.raises(ValueError, match=f"lm_head: {total} rows cannot be cut over tensor parallel size {ranks}"):
            row_share(total, 0, ranks, "lm_head")
        return
    shares = [row_share(total, rank, ranks, "lm_head") for rank in range(ranks)]
    assert [share.rows for share in shares] == rows
    assert [share.start for share in shares] == [sum(rows[:rank]) for rank in range(ranks)]
    assert {share.most for share in shares} == {rows[0]}


def assert_same_values(result: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(result["logits"], expected["logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(result["logprobs"], expected["logprobs"], rtol=0, atol=1e-5)
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    if "served" in result:
        torch.testing.assert_close(result["served"], expected["logits"][:14], rtol=0, atol=1e-5)


def assert_same_gradients(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """A cut parameter's gradients join, those of one that every rank holds whole add up."""
    for hf_name, (_, size, _, whole) in expected.items():
        is_replicated = ranks[0][hf_name][2]
        joined = torch.full(size, 0.0 if is_replicated else torch.nan)
        for gradients in ranks:
            start, local_size, _, local = gradients[hf_name]
            box = tuple(slice(a, a + n) for a, n in zip(start, local_size, strict=True))
            joined[box] = joined[box] + local if is_replicated else local
        torch.testing.assert_close(joined, whole, rtol=1e-5, atol=2e-5, msg=partial("{}: {}".format, hf_name))


def serve_copies(rank: int, folder: str, config: ModelConfig) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(ValueError, match="num_kv_heads: 1 cannot be cut over tensor parallel size 2: 1 % 2 = 1"):
        Decoder(config, Ops(), group=group)
    decoder = Decoder(config, Ops(), group=group, copies_kv_heads=True)
    decoder.init_weights(5)
    found = {"at once": serve(decoder)}
    for ordered in (False, True):
        sums = GroupSums(group, Ops(), ordered=ordered)
        decoder.defer_sums(sums)
        found[f"deferred, ordered {ordered}"] = serve(decoder)
        assert sums.calls == 2 * config.num_layers + 2, "two in a layer, one of the embedding, one of the logits"
        found[f"halves, ordered {ordered}"] = serve(decoder, cut=9)
        assert sums.calls == (2 + 4) * config.num_layers + 5, "each half has its own"
        assert not sums.agree(rank == 0)
        assert sums.agree(True)
        check_dealt(decoder, sums)
    torch.save(found, f"{folder}/{rank}.pt")
    leave()


def check_dealt(decoder: Decoder, sums: GroupSums) -> None:
    """Each rank draws whole rows, its share of them, and all have the tokens of all rows."""
    hidden_BD = torch.randn(16, decoder.config.hidden_size, generator=torch.Generator().manual_seed(3))
    own = sums.own_rows(16)
    with torch.no_grad():
        whole_BV = decoder.logits(hidden_BD)
        assert torch.equal(decoder.dealt_logits(hidden_BD), whole_BV[own])
    assert (own.start, own.stop) == (8 * sums.rank, 8 * sums.rank + 8)
    best_B, tokens_B = whole_BV.max(1)
    mine = SampledTokens(tokens_B[own], best_B[own] > best_B.median())
    found = collected(mine, sums)
    assert torch.equal(found.tokens, tokens_B)
    assert torch.equal(found.valid, best_B > best_B.median())
    with pytest.raises(ValueError, match="7 rows cannot be dealt to 2 ranks"):
        sums.own_rows(7)


def test_deferred_sums_and_copies_of_kv_heads_give_the_logits_of_one_rank(llama: ModelConfig, tmp_path: Path) -> None:
    """A cut of heads that is not even is refused with the arithmetic, unless ranks may have copies of one. That of the
    vocabulary needs not be even."""
    config = replace(llama, num_kv_heads=1, vocab_size=95)
    one = Decoder(config, Ops())
    one.init_weights(5)
    expected = serve(one)
    spawn(serve_copies, (str(tmp_path), config), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert len(first) == 5
    for name, logits in first.items():
        assert torch.equal(logits, second[name])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
