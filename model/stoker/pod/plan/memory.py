"""Memory of one rank by part: weights, gradients, optimizer state, activations, buffers.

As the trainer allocates it (`trainer/rank/zero`, `gradient_sum`, `gradient_wire`, `communicator`, the model's fused
kernels), at the fullest moment of a step: the loss of the last stage, or backward of the first layer elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from stoker.pod.plan.activations import Recomputed, choose_kept, layer_tensors
from stoker.pod.plan.context import context_buffers
from stoker.pod.plan.job import Job
from stoker.pod.plan.layer_choice import mean_recomputed, planned_activations
from stoker.pod.plan.layer_kinds import layer_jobs
from stoker.pod.plan.stage import Parameters, PipelineRank, pipeline_ranks, rank_parameters

LOGITS_BYTES = 2200 * 2**20
"""Largest chunk of logits (`CHUNK_BYTES` of the model's fused cross entropy)."""
WIRE_BUFFERS = 2
"""Send buffers of the layers' buckets (`WIRE_DEPTH`)."""
OFFLOAD_PIECE, OFFLOAD_WINDOWS = 1 << 24, 3
"""Elements of offloaded state that are copied and updated at once, and how many such windows the device has."""
DISK_BUFFERS, DISK_THREADS = 6, 4
"""Pieces of state in a file that host memory holds at once, and the threads that read and write them."""
MOMENTS_BYTES, MASTER_BYTES, SUM_BYTES = 8, 4, 4


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank's device, and of its share of the host."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    """Send and receive buffers, gathered weights, logits, what backward needs for a moment."""
    host: float = 0.0
    """Page-locked memory of the host: the snapshot of a save, and offloaded state."""
    disk: float = 0.0
    """On the volume of `nvme_offload`: the state, and room for the copy that a save reads."""

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    def parts(self) -> dict[str, float]:
        """The parts on the device, by name; their sum is `total`."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "buffers": self.buffers,
        }


def memory_by_rank(job: Job) -> list[Memory]:
    """Return the memory of each pipeline rank; the ranks of the other axes are alike."""
    return [_rank_memory(job, rank) for rank in pipeline_ranks(job)]


def fullest(job: Job) -> Memory:
    """Return the memory of the pipeline rank that needs most."""
    return max(memory_by_rank(job), key=lambda memory: memory.total)


@lru_cache(maxsize=64)
def recomputed(job: Job) -> Recomputed:
    """Return what a layer keeps; the mean over all layers with a budget, and in a model with two kinds of them."""
    if job.activation_budget_bytes is not None:
        return mean_recomputed(job)
    layers = layer_jobs(job)
    known = {id(kind): choose_kept(kind) for kind in {id(kind): kind for kind in layers}.values()}  # a hash costs more
    found = [known[id(kind)] for kind in layers]
    names = dict.fromkeys(name for one in found for name in one.again)
    kept, work = sum(one.kept_bytes for one in found), sum(one.work for one in found)
    return Recomputed(kept / len(found), tuple(names), work / len(found))


def sends_each(job: Job) -> bool:
    """Whether each micro-batch's gradient is sent alone; else a rank first adds them up in fp32."""
    ranks = job.layout.state_shards * job.layout.replicate
    later = job.layout.zero_stage >= 2 and not job.any_data_parallel
    return ranks > 1 and (job.micro_batches == 1 or later)


def sharded(job: Job, parameters: Parameters) -> float:
    """Return the elements of a rank's shard of all weights, adapters left out."""
    return parameters.dense / job.layout.state_shards + parameters.experts / job.layout.expert_shards


def sharded_state(job: Job, parameters: Parameters) -> float:
    """Return the elements of a rank's shard of the ZeRO state."""
    if parameters.adapters is not None:
        experts = parameters.expert_adapters / job.layout.expert_shards
        return parameters.adapters / job.layout.state_shards + experts
    return sharded(job, parameters)


def state_bytes(job: Job) -> int:
    """Return the bytes of optimizer state per element; fp32 weights are their own masters."""
    return MOMENTS_BYTES + (MASTER_BYTES if job.precision != "fp32" else 0)


def _rank_memory(job: Job, rank: PipelineRank) -> Memory:
    parameters = rank_parameters(job, rank)
    shard, stage = sharded_state(job, parameters), job.layout.zero_stage
    held = parameters.trained if stage == 0 else shard
    state = held * state_bytes(job)
    on_device = 0.0 if job.offload else state
    snapshot = shard * (MOMENTS_BYTES + MASTER_BYTES)
    adapters = 0.0
    if parameters.adapters is not None:
        adapters = job.value_bytes * parameters.trained
        snapshot += job.value_bytes * sharded(job, parameters)
    if job.offload == "nvme":
        snapshot = DISK_BUFFERS * _offload_piece(job, parameters) * state_bytes(job)
        snapshot += shard * MASTER_BYTES if job.precision == "fp32" else 0.0  # masters that a save copies
    return Memory(
        weights=job.value_bytes * (sharded(job, parameters) if stage == 3 else parameters.total) + adapters,
        gradients=_gradients(job, parameters, shard),
        optimizer=on_device,
        activations=_activations(job, rank),
        buffers=_buffers(job, rank, parameters),
        host=snapshot + (state if job.offload == "host" else 0.0),
        disk=2 * state if job.offload == "nvme" else 0.0,
    )


def _gradients(job: Job, parameters: Parameters, shard: float) -> float:
    if sends_each(job):
        return SUM_BYTES * (parameters.trained if job.layout.zero_stage == 0 else shard)
    if job.layout.zero_stage == 3:
        return SUM_BYTES * shard
    sums = max(1, math.ceil(math.log2(job.micro_batches))) if job.any_data_parallel and job.micro_batches > 1 else 1
    return SUM_BYTES * parameters.trained * sums


def _activations(job: Job, rank: PipelineRank) -> float:
    if job.activation_budget_bytes is not None:
        return planned_activations(job, rank)
    kept = recomputed(job).kept_bytes
    layers = rank.live_stages * rank.largest_stage
    again = max(map(_computed_again, set(layer_jobs(job))))
    last = 2 * job.model.hidden_size * job.value_bytes if rank.is_last else 0.0
    return job.tokens * (layers * kept + again + last)


def _computed_again(kind: Job) -> float:
    """Bytes of a token of the one layer that backward computes again."""
    whole = sum(item.bytes_per_token for item in layer_tensors(kind))
    return max(0.0, whole - choose_kept(kind).kept_bytes)


def _buffers(job: Job, rank: PipelineRank, parameters: Parameters) -> float:
    moment = max(_logits(job) if rank.is_last else 0.0, _backward(job))
    return moment + _wires(job, rank, parameters) + _gathered(job, parameters) + _exchanged(job, parameters)


def _logits(job: Job) -> float:
    """Logits of a chunk, and the gradient of the output layer: fp32 while several chunks add to it."""
    model, tensor, size = job.model, job.layout.tensor, job.value_bytes
    logits = job.tokens * model.vocab_size / tensor * size
    table = 0.0 if job.adapters else model.table / tensor
    return min(logits, LOGITS_BYTES) + table * (size if logits <= LOGITS_BYTES else SUM_BYTES)


def _backward(job: Job) -> float:
    """Gradients of one layer's widest tensors."""
    model = job.model
    if model.num_experts:
        width = 3 * model.experts_per_token * model.expert_size + model.experts_per_token * model.hidden_size
    else:
        # in fp8 also the gradient of gate and up in eight bits, in both orders
        width = (5 if job.precision == "fp8" else 3) * model.intermediate_size
    return job.tokens * job.value_bytes * (width / job.layout.tensor + 2 * model.hidden_size)


def _wires(job: Job, rank: PipelineRank, parameters: Parameters) -> float:
    """Gradients on their way: the sender's buffers in the weights' type, and the receiver's."""
    if job.layout.state_shards * job.layout.replicate == 1:
        return 0.0
    if parameters.adapters is not None:
        return 2 * SUM_BYTES * parameters.trained
    received = (2 if job.copies_gradients else 1) * parameters.largest
    if not sends_each(job):
        return SUM_BYTES * received
    layers = min(WIRE_BUFFERS, rank.layers) * parameters.block
    return job.value_bytes * (layers + parameters.embedding + parameters.head + received)


def _gathered(job: Job, parameters: Parameters) -> float:
    """Weights of stage 3 while they are used, one bucket ahead; copies of the layers' weights in fp8, both ways."""
    gathered = 2 * job.value_bytes * parameters.largest if job.layout.zero_stage == 3 else 0.0
    if job.precision != "fp8":
        return gathered
    blocks = parameters.dense - parameters.embedding - parameters.head
    return gathered + 2 * (2 * parameters.dense_block if job.layout.zero_stage == 3 else blocks)


def _exchanged(job: Job, parameters: Parameters) -> float:
    """Tensors on their way over the tensor, context, expert and pipeline ranks; a window of offloaded state."""
    model, layout = job.model, job.layout
    row = job.tokens * job.value_bytes
    stream = 2 * row * model.hidden_size if layout.tensor > 1 and layout.sequence_parallel else 0.0
    experts = 2 * row * model.experts_per_token * model.hidden_size if layout.expert > 1 else 0.0
    pipeline = 4 * row * model.hidden_size if layout.pipeline > 1 else 0.0
    window = OFFLOAD_WINDOWS * _offload_piece(job, parameters) * state_bytes(job) if job.offload else 0.0
    return stream + context_buffers(job) + experts + pipeline + window


def _offload_piece(job: Job, parameters: Parameters) -> float:
    """Elements of offloaded state that are moved and updated at once."""
    layout = job.layout
    return min(OFFLOAD_PIECE, parameters.largest / (layout.state_shards if layout.zero_stage else 1))
