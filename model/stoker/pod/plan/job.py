"""What a plan is made from: model, layout, batch and savings of memory of one job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from stoker.pod.pipeline.actions import ScheduleName
from stoker.pod.plan.model_size import ModelSize

Precision = Literal["fp32", "fp16", "bf16", "fp8"]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["", "host", "nvme"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the rank grid `[pipeline, replicate, shard, context, tensor]`, and how ranks work together."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    sequence_parallel: bool = False
    schedule: ScheduleName = "OneFOneB"
    stages_per_rank: int = 1
    context_method: str = "AllGather"
    zero_stage: int = 1
    recompute: Recompute = "none"

    @classmethod
    def from_config(cls, parallelism: Mapping[str, Any], memory: Mapping[str, Any], world_size: int) -> Self:
        """Read both sections of the trainer's configuration.

        Raises:
            ValueError: the sizes do not divide the ranks.
        """
        sizes = {name: parallelism.get(name, 1) for name in ("pipeline", "replicate", "context", "tensor")}
        fixed = 1
        for size in sizes.values():
            fixed *= size
        if world_size % fixed:
            shown = " x ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(f"parallelism: {shown} = {fixed} does not divide the {world_size} ranks of the gang")
        return cls(
            **sizes,
            shard=world_size // fixed,
            expert=parallelism.get("expert", 1),
            sequence_parallel=parallelism.get("sequence_parallel", False),
            schedule=parallelism.get("pipeline_schedule", "OneFOneB"),
            stages_per_rank=parallelism.get("stages_per_rank", 1),
            context_method=parallelism.get("context_method", "AllGather"),
            zero_stage=memory.get("zero_stage", 1),
            recompute=memory.get("activation_checkpointing", "none"),
        )

    @property
    def world_size(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences."""
        return self.replicate * self.shard

    @property
    def state_shards(self) -> int:
        """Ranks that share the ZeRO state of dense parameters."""
        return self.shard * self.context

    @property
    def expert_cut(self) -> int:
        """Parts that the experts of a layer are cut into: whole experts, or the width of each over `tensor`."""
        return self.expert if self.expert > 1 else self.tensor

    @property
    def expert_shards(self) -> int:
        """Ranks that share the ZeRO state of one part of the experts."""
        return max(1, self.shard * self.context * self.tensor // self.expert_cut)


_Share = tuple[int, str, int, str, int]
"""What is left over, field and value that are shared out, axis and its size."""
OF_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
"""The targets of adapters that experts have, too."""
ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", *OF_FEED_FORWARD)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Low-rank adapters, which are trained while the model is frozen."""

    rank: int = 16
    targets: tuple[str, ...] = ALL_TARGETS

    @classmethod
    def from_config(cls, lora: Mapping[str, Any]) -> Self:
        """Read the section `lora` of the trainer's configuration or of a spec; an absent member has its default."""
        return cls(rank=lora.get("rank", cls.rank), targets=tuple(lora.get("targets") or cls.targets))

    def layer_elements(self, model: ModelSize, tensor: int) -> float:
        """Return the elements of a layer's adapters on one of `tensor` ranks, those of experts left out."""
        heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        hidden, width, dense = model.hidden_size, model.intermediate_size, 1 - model.expert_share
        whole_and_cut = {
            "q_proj": (hidden, heads, 1.0),
            "k_proj": (hidden, kv_heads, 1.0),
            "v_proj": (hidden, kv_heads, 1.0),
            "o_proj": (hidden, heads, 1.0),
            **dict.fromkeys(OF_FEED_FORWARD, (hidden, width, dense)),
        }
        found = map(whole_and_cut.__getitem__, self.targets)
        return sum(share * self.rank * (whole + cut / tensor) for whole, cut, share in found)

    def inner_bytes(self, of_attention: bool, model: ModelSize, size: int) -> float:
        """Return the bytes that the adapters of a half of a block keep of one token: A x, scaled."""
        found = sum((target not in OF_FEED_FORWARD) == of_attention for target in self.targets)
        copies = 1 if of_attention or not model.num_experts else model.experts_per_token
        return float(found * copies * self.rank * size)

    def expert_elements(self, model: ModelSize, layout: Layout) -> float:
        """Return the elements of the adapters of a layer's experts on one rank; a mean over all layers."""
        named = sum(target in OF_FEED_FORWARD for target in self.targets)
        experts = model.num_experts / layout.expert
        width = model.expert_size / (layout.tensor if layout.expert == 1 else 1)  # else a rank has whole experts
        return model.expert_share * experts * named * self.rank * (model.hidden_size + width)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job as the arithmetic sees it."""

    model: ModelSize
    layout: Layout
    global_batch_size: int
    micro_batch_size: int
    sequence_length: int
    precision: Precision = "bf16"
    fp8_recipe: str = "Tensorwise"
    activation_budget_bytes: float | None = None
    offload: Offload = ""
    update_passes: int = 1
    """Times that an update reads and writes its state: LAMB needs the norms of whole tensors in between."""
    any_data_parallel: bool = False
    adapters: Adapters | None = None
    """None: the whole model is trained."""
    ranks_per_node: int = 8
    name: str = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], model: ModelSize) -> Self:
        """Read the trainer's configuration (as JSON: snake_case, nested mappings).

        Raises:
            ValueError: the sizes do not multiply out; the message shows the arithmetic.
        """
        parallelism, training = config.get("parallelism") or {}, config["training"]
        memory, gang = config.get("memory") or {}, config.get("gang") or {}
        lora = config.get("lora")  # {}: all defaults
        ranks_per_node = gang.get("ranks_per_node", 1)
        budget = memory.get("activation_budget_gib")
        job = cls(
            model=model,
            layout=Layout.from_config(parallelism, memory, gang.get("nodes", 1) * ranks_per_node),
            global_batch_size=training.get("global_batch_size", 8),
            micro_batch_size=training.get("micro_batch_size", 1),
            sequence_length=training.get("sequence_length", 2048),
            precision=memory.get("precision", "bf16"),
            fp8_recipe=memory.get("fp8_recipe", "Tensorwise"),
            activation_budget_bytes=None if budget is None else float(budget) * 2**30,
            offload="nvme" if memory.get("nvme_offload") else "host" if memory.get("cpu_offload") else "",
            update_passes=2 if (config.get("optimization") or {}).get("optimizer") == "lamb" else 1,
            any_data_parallel=training.get("deterministic") == "AnyDataParallel",
            adapters=None if lora is None else Adapters.from_config(lora),
            ranks_per_node=ranks_per_node,
            name=(config.get("job") or {}).get("name", ""),
        )
        job.check()
        return job

    def check(self) -> None:
        """Raise ValueError where batch, layers, heads or sequence do not divide by the layout."""
        layout, model = self.layout, self.model
        ranks = layout.data_parallel
        rows = self.micro_batch_size * ranks
        if self.global_batch_size % rows:
            raise ValueError(
                f"globalBatchSize {self.global_batch_size} is not a multiple of microBatchSize "
                f"{self.micro_batch_size} x data-parallel size {ranks} = {rows}"
            )
        for rest, name, value, axis, size in (*self._shares(), *self._shares_of_heads()):
            if rest:
                raise ValueError(f"{name} {value} is not a multiple of {axis} {size}")
        if layout.pipeline * layout.stages_per_rank > model.num_layers:
            raise ValueError(
                f"numLayers {model.num_layers} are fewer than pipeline {layout.pipeline} x "
                f"stagesPerRank {layout.stages_per_rank}"
            )
        if layout.expert > 1 and not model.num_experts:
            raise ValueError(f"expert {layout.expert} needs a model with experts")

    def _shares(self) -> Iterator[_Share]:
        layout, model = self.layout, self.model
        yield self.sequence_length % layout.context, "sequenceLength", self.sequence_length, "context", layout.context
        yield model.num_heads % layout.tensor, "numHeads", model.num_heads, "tensor", layout.tensor
        yield model.num_kv_heads % layout.tensor, "numKvHeads", model.num_kv_heads, "tensor", layout.tensor
        yield model.num_experts % layout.expert, "numExperts", model.num_experts, "expert", layout.expert

    def _shares_of_heads(self) -> Iterator[_Share]:
        """Ranks of `context` share the heads where they exchange them."""
        layout, model = self.layout, self.model
        if layout.context_method != "Ulysses":
            return
        ranks = layout.tensor * layout.context
        yield model.num_heads % ranks, "numHeads", model.num_heads, "tensor x context", ranks
        kv_heads = max(1, model.num_kv_heads // layout.tensor)
        rest = kv_heads % layout.context and layout.context % kv_heads
        yield rest, "numKvHeads / tensor", kv_heads, "context", layout.context

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one rank in one step."""
        return self.global_batch_size // self.micro_batch_size // self.layout.data_parallel

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch_size * self.sequence_length // self.layout.context

    @property
    def step_tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.global_batch_size * self.sequence_length

    @property
    def expert_rows(self) -> float:
        """Rows that a rank computes for each of its tokens in a layer with experts, where these have equal loads.

        Ranks of `tensor` each take a part of the tokens to whole experts.
        """
        return self.model.experts_per_token / (self.layout.tensor if self.layout.expert > 1 else 1)

    @property
    def fullest_load(self) -> float:
        """Most rows of a rank, as a multiple of those at equal loads.

        The worst case: each token of the `expert` ranks has as many of its experts on this rank as fit there.
        """
        ranks, chosen = self.layout.expert, self.model.experts_per_token
        return ranks * min(chosen, self.model.num_experts // ranks) / chosen if ranks > 1 else 1.0

    @property
    def copies_gradients(self) -> bool:
        """Whether each gradient is copied, so that replicas and other ranks add to it in one order."""
        return self.any_data_parallel and self.layout.replicate > 1 and self.layout.context > 1

    @property
    def value_bytes(self) -> int:
        """Bytes of a weight or activation in forward and backward."""
        return 4 if self.precision == "fp32" else 2

    def with_layout(self, layout: Layout) -> Self:
        return replace(self, layout=layout)
