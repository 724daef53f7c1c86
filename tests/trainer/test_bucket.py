"""Flat buckets: layout properties and views."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stoker.trainer.rank.bucket import ALIGN, LINE, Bucket, make_buckets, plan_bucket

shapes = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12)


@given(shapes, st.sampled_from([1, 2, 3, 4, 8]))
def test_parameters_do_not_overlap_and_shards_are_equal_whole_lines(sizes: list[tuple[int, ...]], shards: int) -> None:
    plan = plan_bucket([(str(index), size) for index, size in enumerate(sizes)], shards)
    end = 0
    for item in plan.ranges:
        assert item.offset >= end
        assert item.offset % ALIGN == 0
        assert item.decay == (item.offset < plan.decay_end) == (len(item.shape) > 1)
        end = item.end
    assert end <= plan.used <= plan.numel == plan.shard_numel * shards
    assert plan.shard_numel % LINE == plan.decay_end % LINE == 0
    assert sorted(item.name for item in plan.ranges) == sorted(str(index) for index in range(len(sizes)))
    assert plan.shard(shards - 1)[1] == plan.numel


@given(shapes, st.sampled_from([1, 2, 4, 8]))
def test_offsets_do_not_depend_on_the_number_of_shards(sizes: list[tuple[int, ...]], shards: int) -> None:
    named = [(str(index), size) for index, size in enumerate(sizes)]
    one, many = plan_bucket(named, 1), plan_bucket(named, shards)
    assert (one.ranges, one.decay_end, one.used) == (many.ranges, many.decay_end, many.used)


def test_parameters_become_views_of_the_buffer_and_keep_their_values() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 3)
    expected = [value.detach().clone() for value in (layer.weight, layer.bias)]
    bucket = Bucket("layer", list(layer.named_parameters()), shards=2)
    bucket.adopt(bucket.master_copy().bfloat16())
    assert layer.weight.dtype == torch.bfloat16
    for parameter, value in zip((layer.weight, layer.bias), expected, strict=True):
        assert torch.equal(parameter, value.bfloat16())
    bucket.flat.fill_(2.0)
    assert layer.weight.min() == layer.bias.max() == 2.0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_every_parameter_lies_in_one_bucket_and_a_tied_one_only_once() -> None:
    model = Tied()
    buckets = make_buckets([(f"blocks.{index}", block) for index, block in enumerate(model.blocks)], model)
    assert [(bucket.name, [item.name for item in bucket.plan.ranges]) for bucket in buckets] == [
        ("root", ["embedding.weight"]),
        ("blocks.0", ["blocks.0.weight", "blocks.0.bias"]),
        ("blocks.1", ["blocks.1.weight", "blocks.1.bias"]),
    ]
