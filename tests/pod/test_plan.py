"""The arithmetic of a job: against hand-computed values, against measured runs, and against its own rules."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.model.config import ModelConfig
from stoker.pod.pipeline.formulas import bubble
from stoker.pod.pipeline.simulation import Costs
from stoker.pod.plan import memory as plan_memory
from stoker.pod.plan.activations import choose_kept, layer_tensors
from stoker.pod.plan.context import context_buffers
from stoker.pod.plan.estimate import make_plan
from stoker.pod.plan.gpu import GIB, GPUS, RESERVE_BYTES, gpu_named, known_gpu
from stoker.pod.plan.job import Job, Layout
from stoker.pod.plan.layouts import layouts
from stoker.pod.plan.measured import check_plan
from stoker.pod.plan.memory import fullest, memory_by_rank
from stoker.pod.plan.model_size import ModelSize
from stoker.pod.plan.optimizer_time import NVME, PCIE, early_share
from stoker.pod.plan.stage import pipeline_ranks, pipeline_shape, rank_parameters
from stoker.pod.plan.traffic import EXPERTS, flows
from testing.pod.model_sizes import LLAMA_1B, LLAMA_8B

SLICE = replace(LLAMA_8B, num_layers=12)
MOE = ModelSize(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    qk_norm=True,
    num_experts=8,
    experts_per_token=2,
    expert_size=32,
)
TINY = ModelSize(
    vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=2
)


def job(model: ModelSize = LLAMA_8B, batch: int = 4, micro: int = 1, length: int = 8192, **changes: Any) -> Job:
    names = {field.name for field in fields(Layout)}
    layout = Layout(**{name: value for name, value in changes.items() if name in names})
    rest = {name: value for name, value in changes.items() if name not in names}
    return Job(
        model=model, layout=layout, global_batch_size=batch, micro_batch_size=micro, sequence_length=length, **rest
    )


# bench/README.md: peak of torch's allocator in the first run of a process, tokens/s/GPU on H200s
MEASURED = {
    "T1": (job(shard=4), 88.4, 10_847),
    "T2 with ZeRO-2": (job(batch=16, shard=4, zero_stage=2), 92.6, 11_168),
    "T3, 12 layers, two GPUs": (job(SLICE, 4, 2, shard=2, precision="fp8"), 73.1, 35_033),
    "T3 by rows, 12 layers": (job(SLICE, 4, 2, shard=2, precision="fp8", fp8_recipe="Rowwise"), 73.2, 31_543),
    "T4 on one GPU": (job(LLAMA_1B, 8, 8, 2048), 45.7, 71_234),
}


@pytest.mark.parametrize("name", MEASURED)
def test_memory_and_speed_are_within_a_tenth_of_what_was_measured(name: str) -> None:
    found, gib, speed = MEASURED[name]
    plan = make_plan(found, GPUS["H200"])
    assert plan.fullest.total / GIB == pytest.approx(gib, rel=0.1)
    assert plan.tokens_per_s_per_gpu == pytest.approx(speed, rel=0.1)
    assert plan.fits


HALF = replace(LLAMA_8B, num_layers=16)
SPARSE_30B = ModelSize(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=10,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    qk_norm=True,
    num_experts=128,
    experts_per_token=8,
    expert_size=768,
)
"""The shape of Qwen3-30B-A3B with 10 of its layers."""
# bench/gpu/README.md, "Layouts of the trainer on two H200s" and on four: rows of bench/gpu/layouts_gpu.py
LAYOUTS_MEASURED = {
    "data, 32 layers": (job(LLAMA_8B, 4, shard=2), 131.4, 10_866),
    "zero3, 32 layers": (job(LLAMA_8B, 4, shard=2, zero_stage=3), 114.7, 10_731),
    "data": (job(HALF, 4, shard=2), 74.2, 20_352),
    "tensor": (job(HALF, 4, 2, tensor=2, sequence_parallel=True), 61.2, 19_373),
    "pipeline:OneFOneB": (job(HALF, 8, pipeline=2), 63.5, 17_956),
    "pipeline:ZeroBubble": (job(HALF, 8, pipeline=2, schedule="ZeroBubble"), 63.6, 19_510),
    "context:Ulysses": (job(HALF, 1, 1, 16384, context=2, context_method="Ulysses"), 67.3, 17_311),
    "context:AllGather": (job(HALF, 1, 1, 16384, context=2), 67.5, 15_299),
    "context:Ring": (job(HALF, 1, 1, 16384, context=2, context_method="Ring"), 67.5, 14_633),
    "experts": (job(SPARSE_30B, 4, 2, 4096, shard=2, expert=2), 73.3, 44_870),
    "experts on four": (job(replace(SPARSE_30B, num_layers=24), 8, 2, 4096, shard=4, expert=4), 98.6, 20_439),
    "tensor on four": (job(LLAMA_8B, 8, 4, tensor=4, sequence_parallel=True), 85.1, 9_193),
    "mixed on four": (job(LLAMA_8B, 8, 2, tensor=2, shard=2, sequence_parallel=True), 89.3, 10_177),
    "zero3 on four": (job(LLAMA_8B, 8, shard=4, zero_stage=3), 81.1, 10_577),
    "tensor on four, flash": (job(LLAMA_8B, 8, 4, tensor=4, sequence_parallel=True), 85.1, 9_632),
    "mixed on four, flash": (job(LLAMA_8B, 8, 2, tensor=2, shard=2, sequence_parallel=True), 89.3, 10_217),
    "zero3 on four, flash": (job(LLAMA_8B, 8, shard=4, zero_stage=3), 81.1, 10_630),
    "T1 on four": (job(LLAMA_8B, 4, shard=4), 88.4, 10_677),
    "T2 on four": (job(LLAMA_8B, 16, shard=4), 110.0, 10_990),
    "context:Ulysses on four": (job(LLAMA_8B, 1, 1, 32768, context=4, context_method="Ulysses"), 87.9, 7_336),
    "long:Ulysses on four": (job(LLAMA_8B, 1, 1, 65536, context=4, context_method="Ulysses"), 127.1, 5_426),
    "pipeline:OneFOneB on four": (job(LLAMA_8B, 16, pipeline=4), 76.4, 8_710),
    "pipeline:Interleaved on four": (
        job(LLAMA_8B, 16, pipeline=4, schedule="Interleaved", stages_per_rank=2), 91.9, 9_810,
    ),
    "pipeline:ZeroBubble on four": (job(LLAMA_8B, 16, pipeline=4, schedule="ZeroBubble"), 76.5, 9_825),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS_MEASURED)
def test_memory_and_speed_of_every_measured_layout_are_near(name: str) -> None:
    found, gib, speed = LAYOUTS_MEASURED[name]
    plan = make_plan(found, GPUS["H200"])
    assert plan.fullest.total / GIB == pytest.approx(gib, rel=0.03)
    assert plan.tokens_per_s_per_gpu == pytest.approx(speed, rel=0.05)


def test_experts_of_other_ranks_cost_moves_and_waits_of_the_host() -> None:
    """Profiled (row `experts`): 38 ms of element-wise kernels, 32 of communication alone, 11 of an idle device."""
    time = make_plan(LAYOUTS_MEASURED["experts"][0], GPUS["H200"]).time
    alone = make_plan(job(SPARSE_30B, 4, 2, 4096, shard=2), GPUS["H200"]).time
    assert time is not None
    assert alone is not None
    assert 20e-3 < time.elementwise < 40e-3
    assert 35e-3 < time.communication < 55e-3
    assert alone.elementwise < time.elementwise / 2
    assert alone.communication < time.communication / 2


def test_experts_stay_in_two_bytes_beside_fp8() -> None:
    dense, sparse = (
        {
            precision: make_plan(job(model, 4, 2, 4096, shard=2, precision=precision), GPUS["H200"])
            for precision in ("bf16", "fp8")
        }
        for model in (replace(SPARSE_30B, num_experts=0, experts_per_token=0), SPARSE_30B)
    )
    copies = {
        name: found["fp8"].fullest.buffers - found["bf16"].fullest.buffers
        for name, found in {"dense": dense, "sparse": sparse}.items()
    }
    assert copies["sparse"] == pytest.approx(2 * 10 * (SPARSE_30B.attention + SPARSE_30B.small))
    times = {
        name: [found[precision].time for precision in ("bf16", "fp8")]
        for name, found in {"dense": dense, "sparse": sparse}.items()
    }
    saved = {name: pair[0].products - pair[1].products for name, pair in times.items() if pair[0] and pair[1]}
    attention = 6 * 16384 / 2 * 10 * SPARSE_30B.attention / (989e12 * 0.655)
    assert saved["sparse"] == pytest.approx(attention * (1 - 989 / 1979), rel=1e-6)
    assert saved["dense"] > saved["sparse"]


def test_recompute_costs_what_was_measured() -> None:
    plan = make_plan(job(shard=4, recompute="full"), GPUS["H200"])
    assert plan.tokens_per_s_per_gpu == pytest.approx(8_348, rel=0.1)


def test_the_sizes_of_a_model_are_those_of_its_configuration() -> None:
    found: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
    }
    for extra in ({"architecture": "llama"}, {"architecture": "qwen3", "tie_embeddings": True}):
        config = ModelConfig(**found, **extra)
        assert ModelSize.from_fields({**found, **extra}).parameters == config.num_parameters
    experts = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 6, "mlp_only_layers": (1,)}
    for extra in ({"architecture": "qwen2"}, {"architecture": "qwen3-moe", **experts}):
        config = ModelConfig(**found, **extra)
        size = ModelSize.from_fields(asdict(config))
        assert size.parameters == config.num_parameters
        assert size.num_layers * size.active_layer < config.num_active_parameters
    assert LLAMA_8B.parameters == 8_030_261_248
    with pytest.raises(ValueError, match="hidden_size, num_layers is missing"):
        ModelSize.from_fields({"vocab_size": 1, "intermediate_size": 1, "num_heads": 1})


def test_experts_are_counted_once_and_active_ones_by_token() -> None:
    layer = 64 * (2 * 64 + 2 * 32) + (2 * 64 + 2 * 8) + 64 * 8 + 8 * 3 * 64 * 32
    assert MOE.parameters == 4 * layer + 2 * 64_000 + 64
    assert MOE.active_layer == 64 * 192 + 2 * 3 * 64 * 32 + 64 * 8


# A layer of TINY has 8 * (2*8 + 2*4) + 16 + 3*8*16 = 592 elements, the model 4 * 592 + 2 * 800 + 8 = 3,976.
STATES = [
    # layout, precision, micro-batches: weights, gradients, optimizer in bytes per element of the model
    ({"shard": 1, "zero_stage": 0}, "bf16", 1, (2, 4, 12)),
    ({"shard": 4, "zero_stage": 0}, "bf16", 1, (2, 4, 12)),
    ({"shard": 4, "zero_stage": 1}, "bf16", 1, (2, 1, 3)),
    ({"shard": 4, "zero_stage": 1}, "bf16", 2, (2, 4, 3)),
    ({"shard": 4, "zero_stage": 2}, "bf16", 2, (2, 1, 3)),
    ({"shard": 4, "zero_stage": 3}, "bf16", 2, (0.5, 1, 3)),
    ({"shard": 2, "context": 2, "zero_stage": 3}, "bf16", 2, (0.5, 1, 3)),
    ({"shard": 4, "zero_stage": 1}, "fp32", 1, (4, 1, 2)),
    ({"shard": 4, "replicate": 2, "zero_stage": 1}, "bf16", 1, (2, 1, 3)),
]
PIPED = [(1, (2, 4, 3)), (2, (2, 1, 3)), (3, (0.5, 1, 3))]


@pytest.mark.parametrize(("layout", "precision", "micro_batches", "expected"), STATES)
def test_the_state_of_every_zero_stage(
    layout: dict[str, Any], precision: Any, micro_batches: int, expected: tuple[float, float, float]
) -> None:
    ranks = layout.get("shard", 1) * layout.get("replicate", 1)
    found = fullest(job(TINY, ranks * micro_batches, 1, 16, precision=precision, **layout))
    per_element = tuple(count / 3976 for count in (found.weights, found.gradients, found.optimizer))
    assert per_element == pytest.approx(expected)


@pytest.mark.parametrize(("stage", "expected"), PIPED)
def test_a_pipeline_rank_has_the_state_of_its_layers(stage: int, expected: tuple[float, float, float]) -> None:
    """Three layers of 592 elements and a table of 800; one layer, a norm of 8 and the table of the output layer, whose
    work is that of two."""
    found = memory_by_rank(job(TINY, 8, 1, 16, pipeline=2, shard=4, zero_stage=stage))
    for rank, elements in zip(found, (3 * 592 + 800, 592 + 808), strict=True):
        per_element = tuple(count / elements for count in (rank.weights, rank.gradients, rank.optimizer))
        assert per_element == pytest.approx(expected)


def test_a_pipeline_sends_gradients_and_weights_of_its_layers_for_each_micro_batch() -> None:
    layers, table = 3 * 592, 800
    one, two, three = (
        {flow.purpose: flow.bytes for flow in flows(job(TINY, 8, 1, 16, pipeline=2, shard=2, zero_stage=stage))}
        for stage in (1, 2, 3)
    )
    assert one["gradients reduced"] == 4 * (layers + table) / 2
    assert two["gradients reduced"] == three["gradients reduced"] == 4 * 2 * (layers + table) / 2
    assert three["weights gathered"] == 4 * 2 * (2 * layers + table) / 2


def test_offloaded_state_is_on_the_host() -> None:
    kept, moved = (fullest(job(shard=4, offload=place)) for place in ("", "host"))
    assert moved.optimizer == 0
    assert moved.host - kept.host == kept.optimizer


def test_state_in_a_file_needs_a_volume_and_its_seconds() -> None:
    kept, moved = (make_plan(job(shard=4, offload=place), GPUS["H200"]) for place in ("", "nvme"))
    assert moved.fullest.optimizer == 0
    assert moved.fullest.disk == 2 * kept.fullest.optimizer
    assert moved.fullest.host < kept.fullest.host, "a save reads the file: no snapshot in memory"
    assert kept.time is not None
    assert moved.time is not None
    assert moved.time.optimizer == pytest.approx(12 * LLAMA_8B.parameters / NVME)
    assert moved.to_json()["memory_bytes"]["disk"] == moved.fullest.disk


def test_state_in_host_memory_arrives_beside_backward_and_leaves_beside_the_next_passes() -> None:
    """T9: 4 micro-batches. On four ranks three shards of the gradient's sum hold all of a shard's state."""
    shares = {
        (ranks, stage): early_share(job(batch=4 * ranks, shard=ranks, zero_stage=stage, offload="host"))
        for ranks in (1, 2, 4, 8)
        for stage in (0, 1, 2)
    }
    assert [shares[ranks, 1] for ranks in (1, 2, 4, 8)] == [0.0, 1 / 3, 1.0, 1.0]
    assert {share for (_, stage), share in shares.items() if stage != 1} == {0.0}
    assert early_share(job(shard=4, offload="host")) == 0.0, "one micro-batch is sent as it is"
    kept, moved = (make_plan(job(batch=16, shard=4, offload=place), GPUS["H200"]).time for place in ("", "host"))
    assert kept is not None
    assert moved is not None
    assert moved.optimizer == kept.optimizer, "4 ranks: every copy is beside a pass"
    one_way = 12 * SLICE.parameters / 2 / PCIE
    kept, moved = (make_plan(job(SLICE, batch=8, shard=2, offload=place), GPUS["H200"]).time for place in ("", "host"))
    assert kept is not None
    assert moved is not None
    passes = (kept.total - kept.optimizer) / 4
    assert moved.optimizer == pytest.approx(2 / 3 * one_way - passes / 3, rel=0.05)
    lamb = job(SLICE, batch=8, shard=2, offload="host", update_passes=2)
    twice = make_plan(lamb, GPUS["H200"]).time
    assert twice is not None
    assert early_share(lamb) == 1 / 6, "the first pass reads it, of two"
    assert twice.optimizer == pytest.approx(moved.optimizer + one_way, rel=0.05)
    slow = make_plan(job(SLICE, batch=2, shard=2, offload="host"), GPUS["H200"]).time
    assert slow is not None
    assert slow.optimizer > moved.optimizer


def test_tensor_parallel_ranks_share_matrices_and_not_norms() -> None:
    rank = pipeline_ranks(job(TINY, 4, 1, 16, tensor=2))[0]
    parameters = rank_parameters(job(TINY, 4, 1, 16, tensor=2), rank)
    assert parameters.block == (192 + 384) / 2 + 16
    assert parameters.total == 4 * parameters.block + 2 * 400 + 8


def test_activations_of_a_layer_by_hand() -> None:
    """Of one token in bf16: residual sums and norms 4 x 8, q k v 16, rotated 12, attention 8, ffn 3 x 16 elements, and
    the 4 fp32 numbers of attention's softmax.
    """
    kept = sum(item.bytes_per_token for item in layer_tensors(job(TINY, 1, 1, 16)))
    assert kept == 2 * (4 * 8 + 16 + 12 + 8 + 3 * 16) + 16
    split = {item.name: item.bytes_per_token for item in layer_tensors(job(TINY, 1, 1, 16, tensor=2))}
    assert split["gate and up"] == 2 * 16
    assert split["attention norm"] == split["feed-forward norm"] == 16
    shared = job(TINY, 1, 1, 16, tensor=2, sequence_parallel=True)
    kept_cut = {item.name: item.bytes_per_token for item in layer_tensors(shared)}
    assert (kept_cut["residual sums"], kept_cut["attention norm"]) == (16, 16), "products keep the tokens of all ranks"


def test_full_recompute_keeps_the_inputs_and_one_layer() -> None:
    none, full = (fullest(job(TINY, 1, 1, 16, recompute=mode)) for mode in ("none", "full"))
    layer = sum(item.bytes_per_token for item in layer_tensors(job(TINY, 1, 1, 16)))
    assert none.activations == 16 * (4 * layer + 32)
    assert full.activations == 16 * (4 * 32 + (layer - 32) + 32)


def test_selective_drops_what_kernels_of_elements_give() -> None:
    chosen = choose_kept(job(recompute="selective"))
    assert set(chosen.again) == {"attention norm", "rotated q and k", "feed-forward norm", "activated"}


def test_a_pipeline_keeps_the_activations_of_its_schedule() -> None:
    one = sum(item.bytes_per_token for item in layer_tensors(job(TINY, 8, 1, 16))) * 16
    for name, stages, live in (("OneFOneB", 1, 4), ("GPipe", 1, 8), ("Interleaved", 2, 11), ("ZeroBubble", 1, 4)):
        model = replace(TINY, num_layers=8)
        found = job(model, 8, 1, 16, pipeline=4, schedule=name, stages_per_rank=stages)
        assert pipeline_ranks(found)[0].live_stages == live
        layers = 8 // (4 * stages)
        assert memory_by_rank(found)[0].activations == pytest.approx(live * layers * one)


def test_the_bubble_is_that_of_the_schedule() -> None:
    found = job(batch=16, pipeline=4)
    time = make_plan(found, GPUS["H200"]).time
    assert time is not None
    assert time.bubble_share == pytest.approx(3 / 19)
    zero = job(batch=16, pipeline=4, schedule="ZeroBubble")
    assert make_plan(zero, GPUS["H200"]).to_json()["bubble"] == bubble("ZeroBubble", pipeline_shape(zero), Costs())


def test_traffic_by_hand() -> None:
    weights = 2 * LLAMA_8B.parameters * 3 / 4
    assert {flow.purpose: flow.bytes for flow in flows(job(shard=4))} == {
        "gradients reduced": weights,
        "weights gathered": weights,
    }
    stage3 = {flow.purpose: flow.bytes for flow in flows(job(batch=8, shard=4, zero_stage=3))}
    ends = 2 * (2 * 128256 * 4096 + 4096) * 3 / 4
    assert stage3 == {"gradients reduced": 2 * weights, "weights gathered": 4 * weights - 2 * ends}
    tensor = {flow.purpose: flow for flow in flows(job(batch=1, tensor=4, sequence_parallel=True))}
    assert tensor["tensor parallel"].bytes == 8 * 32 * 8192 * 4096 * 2 * 3 / 4
    for recompute, is_cut, passes in (("selective", True, 10), ("selective", False, 8), ("full", True, 12)):
        again = job(batch=1, tensor=4, sequence_parallel=is_cut, recompute=recompute)
        (sent,) = (flow.bytes for flow in flows(again) if flow.purpose == "tensor parallel")
        assert sent == passes * 32 * 8192 * 4096 * 2 * 3 / 4, (recompute, is_cut)
    pipeline = {flow.purpose: flow for flow in flows(job(batch=16, pipeline=4))}
    assert pipeline["pipeline"].bytes == 2 * 16 * 8192 * 4096 * 2
    ring = {flow.purpose: flow for flow in flows(job(batch=1, context=4, context_method="Ring"))}
    keys, queries = 2 * 2048 * 1024, 2048 * 4096
    assert ring["context parallel"].bytes == 32 * keys * (2 * 3 * 2 + 4 * 4)
    gathered = {flow.purpose: flow for flow in flows(job(batch=1, context=4))}
    assert gathered["context parallel"].bytes == 32 * keys * 3 * 3 * 2
    heads = {flow.purpose: flow for flow in flows(job(batch=1, context=4, context_method="Ulysses"))}
    assert heads["context parallel"].bytes == 32 * 2 * (2 * queries + keys) * 2 * 3 / 4
    experts = {flow.purpose: flow for flow in flows(job(MOE, 4, 1, 16, shard=4, expert=4))}
    assert experts["experts"].bytes == 4 * 4 * 16 * 2 * 64 * 2 * 3 / 4


def test_sums_over_replicas_in_one_order_cost_a_buffer_and_send_the_whole_gradient() -> None:
    layout: dict[str, Any] = {"batch": 8, "replicate": 2, "context": 2, "shard": 2}
    plain, ordered = job(**layout), job(**layout, any_data_parallel=True)
    head, trained = 128256 * 4096 + 4096, LLAMA_8B.parameters
    assert fullest(ordered).buffers - fullest(plain).buffers == 4 * head
    sent = {flow.purpose: flow.bytes for flow in flows(ordered)}
    assert sent["gradients reduced"] == 4 * trained * 3 / 4 / 2
    assert sent["gradients over replicas"] == (4 * trained + 4 * trained / 4) / 2
    beside_tensor = [fullest(job(batch=8, replicate=2, tensor=2, any_data_parallel=mode)) for mode in (False, True)]
    assert beside_tensor[0].buffers == beside_tensor[1].buffers


def test_the_ways_to_share_a_sequence_need_different_memory() -> None:
    """The ring holds two blocks; gathered keys grow with the ranks; neither is there without the axis."""
    assert context_buffers(job(batch=1)) == 0
    found = {
        (method, ranks): context_buffers(job(batch=1, context=ranks, context_method=method))
        for method in ("AllGather", "Ring", "Ulysses")
        for ranks in (2, 8)
    }
    keys, queries = 2 * 1024 * 1024, 1024 * 4096
    assert found["AllGather", 8] == 8 * keys * (2 + 8) + 4 * queries
    assert found["Ring", 8] == keys * (4 + 16) + 8 * queries < found["AllGather", 8]
    assert found["Ulysses", 8] == 4 * (queries + keys) < found["Ring", 8]
    assert all(found[method, 8] < found[method, 2] for method, _ in found)


def test_a_group_that_reaches_over_nodes_uses_the_network() -> None:
    found = {flow.purpose: flow.link for flow in flows(job(batch=8, shard=8, tensor=4, ranks_per_node=8))}
    assert found == {"gradients reduced": "network", "weights gathered": "network", "tensor parallel": "node"}


LAYOUTS = st.builds(
    Layout,
    shard=st.sampled_from([1, 2, 4]),
    replicate=st.sampled_from([1, 2]),
    context=st.sampled_from([1, 2]),
    tensor=st.sampled_from([1, 2, 4]),
    expert=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(),
    zero_stage=st.integers(0, 3),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
MODELS = st.sampled_from([MOE, LLAMA_1B])


def planned(model: ModelSize, layout: Layout, micro_batches: int) -> Job:
    layout = replace(layout, expert=layout.expert if model.num_experts else 1)
    return Job(
        model=model,
        layout=layout,
        global_batch_size=micro_batches * layout.data_parallel,
        micro_batch_size=1,
        sequence_length=256,
    )


@given(MODELS, LAYOUTS, st.sampled_from([1, 2, 4]))
def test_parts_add_to_the_whole(model: ModelSize, layout: Layout, micro_batches: int) -> None:
    plan = make_plan(planned(model, layout, micro_batches), GPUS["H100"])
    found = plan.to_json()
    memory = found["memory_bytes"]
    names = ("weights", "gradients", "optimizer", "activations", "buffers")
    assert memory["total"] == pytest.approx(sum(memory[name] for name in names))
    assert all(memory[name] >= 0 for name in names)
    assert found["step_s"]["total"] == pytest.approx(sum(plan.time.parts().values()) if plan.time else 0)
    assert plan.fits == (memory["total"] + RESERVE_BYTES <= GPUS["H100"].memory_bytes)


@given(MODELS, LAYOUTS, st.sampled_from([1, 2, 4]), st.sampled_from(["shard", "context", "tensor"]))
def test_more_shards_never_need_more_state(model: ModelSize, layout: Layout, micro_batches: int, axis: str) -> None:
    if axis == "tensor" and layout.tensor == 4:
        return
    fewer = fullest(planned(model, layout, micro_batches))
    more = fullest(planned(model, replace(layout, **{axis: 2 * getattr(layout, axis)}), micro_batches))
    for name in ("weights", "gradients", "optimizer", "activations"):
        assert getattr(more, name) <= getattr(fewer, name) * (1 + 1e-12), name


@given(MODELS, LAYOUTS, st.sampled_from([1, 2, 4]))
def test_a_higher_stage_never_needs_more_state(model: ModelSize, layout: Layout, micro_batches: int) -> None:
    found = [fullest(planned(model, replace(layout, zero_stage=stage), micro_batches)) for stage in range(4)]
    states = [memory.weights + memory.gradients + memory.optimizer for memory in found]
    assert states == sorted(states, reverse=True)


def test_the_sizes_of_buffers_are_those_of_the_programs() -> None:
    fused = pytest.importorskip("stoker.model.kernels.fused.cross_entropy", exc_type=ImportError)
    zero = pytest.importorskip("stoker.trainer.rank.zero")
    assert plan_memory.LOGITS_BYTES == fused.CHUNK_BYTES
    assert plan_memory.WIRE_BUFFERS == zero.WIRE_DEPTH


BAD = [
    ({"shard": 3}, "globalBatchSize 4 is not a multiple of microBatchSize 1 x data-parallel size 3 = 3"),
    ({"context": 3}, "sequenceLength 8192 is not a multiple of context 3"),
    ({"context": 64, "context_method": "Ulysses"}, "numHeads 32 is not a multiple of tensor x context 64"),
    ({"tensor": 3}, "numHeads 32 is not a multiple of tensor 3"),
    ({"tensor": 16}, "numKvHeads 8 is not a multiple of tensor 16"),
    ({"pipeline": 33}, "numLayers 32 are fewer than pipeline 33 x stagesPerRank 1"),
    ({"expert": 2, "shard": 2}, "expert 2 needs a model with experts"),
]


@pytest.mark.parametrize(("layout", "message"), BAD)
def test_what_does_not_divide_is_named(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(**layout).check()


def test_a_configuration_is_read_as_the_trainer_reads_it() -> None:
    config = {
        "job": {"name": "base"},
        "optimization": {"optimizer": "lamb"},
        "gang": {"nodes": 2, "ranks_per_node": 8},
        "parallelism": {"tensor": 2, "pipeline": 2, "replicate": 2, "pipeline_schedule": "GPipe"},
        "training": {"global_batch_size": 8, "sequence_length": 64, "deterministic": "AnyDataParallel"},
        "memory": {
            "zero_stage": 0,
            "activation_checkpointing": "selective",
            "activation_budget_gib": 1.5,
            "cpu_offload": True,
        },
    }
    found = Job.from_config(config, LLAMA_8B)
    assert found.layout == Layout(
        tensor=2, pipeline=2, replicate=2, shard=2, schedule="GPipe", zero_stage=0, recompute="selective"
    )
    assert (found.name, found.ranks_per_node, found.micro_batches) == ("base", 8, 2)
    assert found.activation_budget_bytes == 1.5 * GIB
    assert (found.offload, found.any_data_parallel, found.update_passes) == ("host", True, 2)
    with pytest.raises(ValueError, match="pipeline 1 x replicate 1 x context 1 x tensor 3 = 3 does not divide the 4"):
        Job.from_config({**config, "gang": {"nodes": 4}, "parallelism": {"tensor": 3}}, LLAMA_8B)


def test_layouts_fit_keep_the_batch_and_come_fastest_first() -> None:
    found = layouts(job(batch=64, shard=4), 8, GPUS["H200"], built_only=False)
    assert found
    assert all(plan.fits and plan.job.global_batch_size == 64 for plan in found)
    assert all(plan.job.layout.world_size == 8 for plan in found)
    times = [plan.time.total for plan in found if plan.time]
    assert times == sorted(times)
    assert {plan.job.layout.zero_stage for plan in found} >= {1, 2, 3}
    assert len({plan.job.layout for plan in found}) == len(found)


def test_over_several_nodes_shards_may_stay_within_one() -> None:
    small = replace(LLAMA_1B, num_layers=2)

    def replicas(gpus: int, **wanted: int) -> set[tuple[int, int]]:
        """Replicas and ZeRO stages of layouts that cut nothing but data."""
        found = [plan.job.layout for plan in layouts(job(small, 32, 1, 2048, **wanted), gpus, GPUS["H200"])]
        return {(one.replicate, one.zero_stage) for one in found if one.replicate * one.shard == gpus}

    assert replicas(8) == {(1, stage) for stage in range(4)}
    assert replicas(16) == {(1, stage) for stage in range(4)} | {(2, stage) for stage in (1, 2, 3)}
    assert {count for count, _ in replicas(16, replicate=4)} == {1, 2, 4}
    assert {count for count, _ in replicas(4, replicate=3)} == {1}, "3 does not divide 4"
    best = layouts(job(LLAMA_8B, 64, 1, 8192), 64, GPUS["H200"])[0].job.layout
    assert (best.replicate, best.shard) == (8, 8), "gradients cross the slow link once a step"


def test_only_built_layouts_are_listed_and_a_small_gpu_has_none() -> None:
    plans = layouts(job(LLAMA_1B, 8, 1, 2048), 4, GPUS["H100"])
    assert plans
    assert {plan.job.layout.context for plan in plans} == {1, 2, 4}
    sparse = [plan.job.layout for plan in layouts(job(MOE, 8, 1, 16), 4, GPUS["H100"])]
    assert {layout.context for layout in sparse} == {1, 2, 4}
    assert {(layout.tensor, layout.pipeline) for layout in sparse} >= {(1, 1), (2, 1), (1, 2)}
    assert {layout.expert for layout in sparse} == {1, 2, 4}
    small = replace(GPUS["H100"], memory_bytes=8 * GIB)
    assert layouts(job(batch=8), 1, small, built_only=False) == []


REFUSED_BY_TRAINER = {
    "experts, whose rows come from several ranks": (job(MOE, 8, 1, 16, any_data_parallel=True), 4, "expert", {2, 4}),
    "sums of three ranks": (
        job(replace(TINY, num_heads=12, num_kv_heads=6, vocab_size=96), 24, 1, 24, any_data_parallel=True),
        6,
        "context",
        {3, 6},
    ),
    "feed-forward layers that are not cut": (job(replace(TINY, intermediate_size=33), 8, 1, 16), 4, "tensor", {2}),
    "tokens that are not cut": (job(TINY, 8, 1, 17), 4, "tensor", {2}),
    "eight bits": (
        job(replace(TINY, hidden_size=16, head_dim=8, intermediate_size=32), 8, 1, 16, precision="fp8"),
        4,
        "tensor",
        {2},
    ),
}
"""Job, GPUs, and the sizes of an axis that the plan knows and the trainer refuses."""


@pytest.mark.parametrize("name", REFUSED_BY_TRAINER)
def test_layouts_that_the_trainer_refuses_are_not_listed(name: str) -> None:
    found, gpus, axis, sizes = REFUSED_BY_TRAINER[name]
    listed = {getattr(plan.job.layout, axis) for plan in layouts(found, gpus, GPUS["H100"])}
    planned = {getattr(plan.job.layout, axis) for plan in layouts(found, gpus, GPUS["H100"], built_only=False)}
    assert planned - listed == sizes


def test_experts_that_tensor_ranks_cannot_slice_are_listed_whole() -> None:
    plans = layouts(job(replace(MOE, expert_size=33), 8, 1, 16), 4, GPUS["H100"])
    assert {plan.job.layout.expert for plan in plans if plan.job.layout.tensor > 1} == {2, 4}


def test_a_budget_of_activations_stays_in_other_layouts() -> None:
    plans = layouts(job(TINY, 8, 1, 16, activation_budget_bytes=1e6), 4, GPUS["H100"])
    assert plans
    assert {(plan.job.layout.recompute, plan.job.activation_budget_bytes) for plan in plans} == {("selective", 1e6)}


def test_a_job_that_fits_only_in_a_pipeline_with_shared_gradients_or_weights_has_layouts() -> None:
    uncut = replace(LLAMA_8B, num_kv_heads=1)  # for one tensor rank and, with an odd length, one of a sequence
    small = replace(GPUS["H100"], memory_bytes=32 * GIB)
    found = {
        (plan.job.layout.pipeline, plan.job.layout.zero_stage) for plan in layouts(job(uncut, 4, 1, 8191), 8, small)
    }
    assert found == {(8, 0), (8, 1), (8, 2), (4, 2), (4, 3), (2, 3)}


def test_tensor_ranks_take_parts_of_the_tokens_to_whole_experts() -> None:
    sliced, whole = job(MOE, 4, 1, 64, tensor=4, shard=2), job(MOE, 4, 1, 64, tensor=4, shard=2, expert=2)
    assert (sliced.layout.expert_cut, whole.layout.expert_cut) == (4, 2)
    assert (sliced.expert_rows, whole.expert_rows) == (2.0, 0.5)
    assert [job(MOE, 8, 1, 64, shard=8, expert=ranks).fullest_load for ranks in (1, 2, 4, 8)] == [1.0, 2.0, 4.0, 4.0]
    flow = {one.purpose: one for one in flows(whole, pipeline_ranks(whole)[0])}[EXPERTS]
    assert flow.bytes == 4 * 4 * whole.micro_batches * 64 * 0.5 * 64 * 2 / 2


def test_gpus_are_known_by_name_and_by_product() -> None:
    assert gpu_named("h200") is GPUS["H200"]
    assert known_gpu("NVIDIA-H100-80GB-HBM3") is GPUS["H100"]
    assert known_gpu("NVIDIA A100-SXM4-80GB") is GPUS["A100"]
    assert known_gpu("") is None
    with pytest.raises(ValueError, match="gpu 'V100' is unknown; allowed: A100, H100, H200, B200"):
        gpu_named("V100")


def test_a_plan_is_checked_against_the_first_steps() -> None:
    plan = make_plan(job(shard=4), GPUS["H200"])
    assert plan.time is not None
    settled = plan.time.total * 1.25
    seconds = [20.0, 5.8, 2 * settled, settled, settled]  # the first ones compile kernels
    found = check_plan(plan, 0, seconds, int(plan.fullest.total / 0.9))
    assert found.step_error == pytest.approx(-0.2)
    assert found.memory_error == pytest.approx(-0.1)
    assert "predicted (-20.0%)" in found.line()
    unknown = check_plan(make_plan(job(shard=4), None), 0, seconds, None)
    assert (unknown.step_error, unknown.memory_error) == (None, None)
    assert unknown.line() == (
        f"plan: step {settled:.3g} s measured, none predicted (known devices: A100, H100, H200, B200); "
        f"memory {unknown.predicted_bytes / GIB:.1f} GiB predicted, not measured: this system does not count it"
    )
    tiny = check_plan(make_plan(job(MOE, length=64, shard=4), None), 0, seconds, None)
    assert f"memory {tiny.predicted_bytes / 2**20:.1f} MiB predicted" in tiny.line()
