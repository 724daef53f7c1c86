"""The rank grid and the refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.model.config import ModelConfig
from stoker.model.kernels.ops import Ops
from stoker.pod.capabilities import CONTEXT_ATTENTION
from stoker.pod.config_file import ConfigError, parse
from stoker.pod.plan.gpu import GPUS
from stoker.pod.plan.layouts import layouts
from stoker.trainer.protocol.config import ParallelismConfig, TrainerConfig
from stoker.trainer.protocol.parallel_dims import AXES, ParallelDims, check_supported
from stoker.trainer.rank.kernel_choice import make_ops
from stoker.trainer.rank.plan_check import planned_job
from stoker.trainer.rank.run_inputs import check_heads
from testing.trainer.tiny_run import TINY

PLANNED_AXES = ("pipeline", "replicate", "context", "tensor", "expert")
SPARSE = replace(TINY, architecture="qwen3-moe", num_experts=4, num_experts_per_token=2, moe_intermediate_size=24)


def config(**changes: Any) -> TrainerConfig:
    fields: dict[str, Any] = {
        "job": {"name": "run", "uid": "u", "writer": "0a1b2c3d"},
        "gang": {"nodes": 1, "ranks_per_node": 4},
        "termination_log": "log",
        "work_dir": "work",
        "model": {"architecture": "llama"},
        "training": {"total_steps": 2, "global_batch_size": 8},
        "data": {"sources": [{"name": "a", "path": "a.txt"}]},
        "checkpoint": {"root": "root"},
    }
    for path, value in changes.items():
        *sections, field = path.split("__")
        section = fields
        for name in sections:
            section = section.setdefault(name, {})
        section[field] = value
    return parse(TrainerConfig, fields)


def test_what_is_left_of_the_world_is_the_shard_axis() -> None:
    dims = ParallelDims.from_config(ParallelismConfig(tensor=2, pipeline=2), 16)
    assert dims == ParallelDims(pipeline=2, replicate=1, shard=4, context=1, tensor=2)
    assert dims.world_size == 16


def test_sizes_that_do_not_multiply_out_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(
        ConfigError, match="pipeline 3 x replicate 1 x context 1 x tensor 1 = 3 does not divide the 4 ranks"
    ):
        ParallelDims.from_config(ParallelismConfig(pipeline=3), 4)


@pytest.mark.parametrize(
    ("change", "value", "message"),
    [
        (
            "memory",
            {"nvme_offload": {"path": "/x"}, "cpu_offload": True},
            "memory.cpuOffload true is not supported yet with memory.nvmeOffload: both take the whole state; "
            "`stoker plan` shows its size; allowed: false",
        ),
        (
            "training__global_batch_size",
            6,
            "globalBatchSize 6 is not a multiple of microBatchSize 1 x data-parallel size 4 = 4",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name_and_value(change: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_supported(config(**{change: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"parallelism__stages_per_rank": 2},
            "stagesPerRank 2 does not fit pipelineSchedule OneFOneB.*Interleaved, ZeroBubble",
        ),
        (
            {"parallelism__pipeline_schedule": "Interleaved"},
            "pipelineSchedule Interleaved needs parallelism.stagesPerRank above 1, got 1",
        ),
        (
            {
                "parallelism__pipeline": 1,
                "parallelism__pipeline_schedule": "ZeroBubble",
                "parallelism__stages_per_rank": 2,
            },
            "stagesPerRank above 1 needs parallelism.pipeline above 1",
        ),
    ],
)
def test_pipelines_refuse_what_does_not_fit_them(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_supported(config(**{"parallelism__pipeline": 2, **changes}))


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_experts_are_taken_beside_tensor_ranks_and_stages(axis: str) -> None:
    assert check_supported(config(**{f"parallelism__{axis}": 2}, model={"num_experts": 8})).size("shard") == 2


def test_ranks_that_share_sequences_refuse_what_does_not_fit_them() -> None:
    shared = {"parallelism__context": 4}
    assert check_supported(config(**shared, training__sequence_length=64)).data_parallel == 1
    with pytest.raises(ConfigError, match=r"sequenceLength 66 is not a multiple of parallelism.context 4"):
        check_supported(config(**shared, training__sequence_length=66))
    assert check_supported(config(**shared, training__sequence_length=64, model={"num_experts": 8})).context == 4


@pytest.mark.parametrize("method", ["AllGather", "Ring"])
def test_flash_and_cudnn_cannot_attend_to_keys_of_other_ranks(method: str) -> None:
    shared = {"parallelism__context": 2, "parallelism__context_method": method}
    for attention in ("flash", "cudnn"):
        with pytest.raises(
            ConfigError,
            match=f"attention {attention} is not supported yet with parallelism.context 2 and contextMethod "
            f"{method}; allowed: auto, sdpa, stoker",
        ):
            check_supported(config(**shared, attention=attention))
    for attention in ("auto", "stoker", "sdpa"):
        assert check_supported(config(**shared, attention=attention)).context == 2
    ulysses = {**shared, "parallelism__context_method": "Ulysses"}
    assert check_supported(config(**ulysses, attention="flash")).context == 2


def test_auto_attention_is_one_that_the_exchange_of_keys_can_use() -> None:
    asked = config(parallelism__context=2, parallelism__context_method="Ring")
    assert make_ops(asked, torch.device("cpu"))[1] == "sdpa"
    assert Ops("fused").attention("auto", torch.float32, among=CONTEXT_ATTENTION["Ring"]) == "stoker"


def test_heads_that_ulysses_cannot_share_are_refused_with_the_arithmetic() -> None:
    shared = {"parallelism__context": 4, "parallelism__context_method": "Ulysses", "parallelism__tensor": 2}
    model = replace(TINY, num_heads=12, num_kv_heads=12)
    with pytest.raises(ConfigError, match=r"parallelism.contextMethod Ulysses: 6 heads .* multiple of context 4"):
        check_heads(config(**shared), model)
    check_heads(config(**shared), replace(model, num_heads=16, num_kv_heads=2))
    check_heads(config(**{**shared, "parallelism__context_method": "Ring"}), model)


@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_any_data_parallel_takes_replicas_beside_axes_that_share_gradients(axis: str) -> None:
    asked = {"training__deterministic": "AnyDataParallel", "parallelism__replicate": 2, f"parallelism__{axis}": 2}
    assert check_supported(config(**asked)).replicate == 2


def test_any_data_parallel_is_refused_beside_experts_cut_over_ranks() -> None:
    assert check_supported(config(parallelism__expert=2)).expert == 2
    with pytest.raises(
        ConfigError, match=r"^training.deterministic AnyDataParallel needs expert 1, got 2: the rows of"
    ):
        check_supported(config(parallelism__expert=2, training__deterministic="AnyDataParallel"))


def test_a_pipeline_with_several_stages_per_rank_is_taken() -> None:
    dims = check_supported(
        config(parallelism__pipeline=2, parallelism__pipeline_schedule="Interleaved", parallelism__stages_per_rank=3)
    )
    assert (dims.pipeline, dims.stages_per_rank, dims.data_parallel) == (2, 3, 2)


def test_any_data_parallel_needs_a_power_of_two() -> None:
    with pytest.raises(ConfigError, match="the data-parallel size to be a power of two, got 3"):
        check_supported(
            config(gang__ranks_per_node=3, training__global_batch_size=9, training__deterministic="AnyDataParallel")
        )


def test_tokens_that_do_not_share_out_over_the_tensor_ranks_are_refused_with_the_arithmetic() -> None:
    cut = {"parallelism__tensor": 4, "parallelism__sequence_parallel": True}
    assert check_supported(config(**cut, training__sequence_length=62, training__micro_batch_size=2)).tensor == 4
    with pytest.raises(ConfigError, match=r"1 x sequenceLength 62 = 62 tokens .* context 1 x tensor 4 = 4"):
        check_supported(config(**cut, training__sequence_length=62))


def test_any_data_parallel_needs_a_power_of_two_of_tensor_ranks() -> None:
    fields = {"gang__ranks_per_node": 3, "parallelism__tensor": 3, "training__deterministic": "AnyDataParallel"}
    with pytest.raises(ConfigError, match="needs tensor to be a power of two, got 3"):
        check_supported(config(**fields))


def test_a_plain_configuration_is_taken() -> None:
    assert check_supported(config()).data_parallel == 4


@pytest.mark.parametrize("deterministic", ["SameLayout", "AnyDataParallel"])
@pytest.mark.parametrize("model", [TINY, SPARSE], ids=["dense", "experts"])
def test_every_layout_that_the_plan_lists_is_taken(model: ModelConfig, deterministic: str) -> None:
    changes = {"training__deterministic": deterministic, "training__sequence_length": 25, "memory__precision": "fp32"}
    plans = layouts(planned_job(config(**changes), model), 4, GPUS["H200"])
    assert plans
    for layout in {plan.job.layout for plan in plans}:
        sizes = {f"parallelism__{axis}": getattr(layout, axis) for axis in (*PLANNED_AXES, "sequence_parallel")}
        names = {"memory__zero_stage": layout.zero_stage, "memory__activation_checkpointing": layout.recompute}
        assert check_supported(config(**changes, **sizes, **names)).shard == layout.shard


def test_ranks_that_differ_on_some_axes_alone_form_a_group() -> None:
    dims = ParallelDims(pipeline=2, shard=2, tensor=2)
    assert dims.groups("replicate", "shard") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert dims.groups("tensor") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert dims.groups("tensor", "shard") == [(0, 2, 1, 3), (4, 6, 5, 7)]
    assert ParallelDims(shard=3).groups("shard") == [(0, 1, 2)]
    assert ParallelDims(shard=2).groups("tensor") == [(0,), (1,)]


sizes = st.integers(1, 3)


@settings(deadline=None)
@given(st.builds(ParallelDims, pipeline=sizes, replicate=sizes, shard=sizes, context=sizes, tensor=sizes))
def test_coordinates_and_groups_cover_every_rank_once(dims: ParallelDims) -> None:
    ranks = range(dims.world_size)
    assert [dims.rank_at(dims.coordinates(rank)) for rank in ranks] == list(ranks)
    for axes in (AXES[:1], AXES[1:4], AXES[3:], AXES):
        groups = dims.groups(*axes)
        assert sorted(rank for group in groups for rank in group) == list(ranks)
        assert {len(group) for group in groups} == {dims.size(*axes)}
        assert all(dims.group_of(rank, *axes) == group for group in groups for rank in group)


@settings(deadline=None)
@given(st.builds(ParallelDims, pipeline=sizes, replicate=sizes, shard=sizes, context=sizes, tensor=sizes), st.data())
def test_experts_lie_over_shard_and_tensor_and_their_gradients_over_the_rest(
    dims: ParallelDims, data: st.DataObject
) -> None:
    width = dims.shard * dims.tensor
    dims = replace(dims, expert=data.draw(st.sampled_from([size for size in range(1, width + 1) if width % size == 0])))
    experts, replicas = dims.expert_groups(), dims.expert_replicas()
    assert {len(group) for group in experts} == {dims.expert}
    if dims.context == 1:
        assert all(group == tuple(range(group[0], group[0] + dims.expert)) for group in experts)
    for groups in (experts, replicas, dims.expert_replicas(replicates=False)):
        assert sorted(rank for group in groups for rank in group) == list(range(dims.world_size))
    index = {rank: group.index(rank) for group in experts for rank in group}
    assert all(len({index[rank] for rank in group}) == 1 for group in replicas)
    assert {len(group) for group in replicas} == {dims.world_size // dims.pipeline // dims.expert}


@settings(deadline=None)
@given(st.builds(ParallelDims, pipeline=sizes, replicate=sizes, shard=sizes, context=sizes, tensor=sizes))
def test_each_part_of_the_loss_counts_once(dims: ParallelDims) -> None:
    places = [dims.coordinates(rank) for rank in dims.loss_ranks()]
    assert {(place.pipeline, place.tensor) for place in places} == {(dims.pipeline - 1, 0)}
    assert len(set(places)) == dims.data_parallel * dims.context
    assert [dims.data_index(rank) for rank in dims.loss_ranks()] == sorted(
        dims.data_index(r) for r in dims.loss_ranks()
    )


def test_an_expert_group_that_does_not_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match=r"expert 3 does not divide shard 2 x tensor 2 = 4"):
        ParallelDims.from_config(ParallelismConfig(expert=3, tensor=2), 4)


def test_each_rank_gets_an_equal_share_of_the_micro_batches() -> None:
    fields = config(training__global_batch_size=24, training__micro_batch_size=2)
    assert check_supported(fields).micro_batches_per_rank(fields.training) == 3


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_pipeline_takes_every_zero_stage_and_kind_of_checkpointing(stage: int, mode: str) -> None:
    changes = {"memory__zero_stage": stage, "memory__activation_checkpointing": mode}
    assert check_supported(config(parallelism__pipeline=2, **changes)).pipeline == 2
