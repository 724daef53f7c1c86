"""The decoder that trainer and engine share: packed tokens in, hidden states or logits out.

It has neither caches nor losses.

T tokens, D hidden, V vocab.

Parameters change by the trainer's optimizer and by the loaders of `weights`; a forward pass changes none.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stoker.model.attend import Attend, CachedAttend
from stoker.model.aux import Aux
from stoker.model.block import Block
from stoker.model.config import ModelConfig
from stoker.model.expert_peers import ExpertCut, ExpertPeers
from stoker.model.experts import Experts
from stoker.model.group_sums import GroupSums
from stoker.model.kernels.block_weights import PreparedBlocks
from stoker.model.kernels.huge_pages import gather
from stoker.model.kernels.kernel_set import CrossEntropy
from stoker.model.kernels.ops import Ops
from stoker.model.parallel import ColumnParallelLinear, Norm, RowParallelLinear, VocabParallel
from stoker.model.parameter import Part, Section
from stoker.model.rotary import RotaryTable


class PartOfPass(NamedTuple):
    """Some tokens of a pass."""

    tokens: Tensor
    """[T]"""
    positions: Tensor
    attend: CachedAttend


class Decoder(nn.Module):
    """A decoder of any family, or the slice `layers` of one (a pipeline stage).

    Parameters are uninitialised until `init_weights` or a loader fills them. With a `group` the products are cut over
    it; with `sequence_parallel` hidden states between them are cut by tokens, whose number must be a multiple of the
    group's size. With an `expert_group` each of its ranks holds a run of every layer's experts, and rows are
    exchanged. For serving: `expert_runs` deals experts out over `group` and `expert_cut` over ranks with other tokens,
    `experts_on_device` keeps the weights of all others in host memory (see `Experts`), and with `copies_kv_heads` a
    group larger than the number of heads of keys and values may have copies of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        group: ProcessGroup | None = None,
        sequence_parallel: bool = False,
        expert_group: ProcessGroup | None = None,
        expert_runs: int = 1,
        expert_cut: ExpertCut | None = None,
        experts_on_device: int | None = None,
        layers: range | None = None,
        copies_kv_heads: bool = False,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.config, self.ops, self.group = config, ops, group
        self.layers = check_layers(config, layers)
        self.rope = RotaryTable(config)
        self.is_packed = False
        self.prepared: PreparedBlocks | None = None
        """All blocks as one call, where the kernels have one for packed weights."""
        self.sums: GroupSums | None = None
        """Set by `defer_sums`."""

        made: Any = {"dtype": dtype, "device": device, "group": group, "sequence_parallel": sequence_parallel}

        def table(name: str) -> VocabParallel:
            return VocabParallel(Section(name, config.vocab_size), config.hidden_size, ops, **made)

        self.embedding = table("model.embed_tokens") if self.is_first else None
        self.blocks = nn.ModuleList(
            Block(
                config,
                layer,
                ops,
                self.rope,
                expert_group=expert_group,
                expert_runs=expert_runs,
                expert_cut=expert_cut,
                experts_on_device=experts_on_device,
                copies_kv_heads=copies_kv_heads,
                **made,
            )
            for layer in self.layers
        )
        self.final_norm = Norm("model.norm", config.hidden_size, config.norm_eps, ops, **made) if self.is_last else None
        tied_here = config.tie_embeddings and self.is_first
        head_name = "model.embed_tokens" if config.tie_embeddings else "lm_head"
        self.lm_head = table(head_name) if self.is_last and not tied_here else None

    @property
    def is_first(self) -> bool:
        """Whether this slice begins with the embedding."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether this slice ends with the norm and the output layer."""
        return self.layers.stop == self.config.num_layers

    @property
    def has_table_copy(self) -> bool:
        """Whether `lm_head` is a copy of a tied table whose original is the first slice's embedding.

        The owner of the parameters adds the gradients of both and keeps them equal.
        """
        return self.config.tie_embeddings and self.is_last and not self.is_first

    @property
    def head(self) -> VocabParallel:
        """The output layer: a table of its own, or the embedding's."""
        assert self.is_last, "the output layer belongs to the last slice"
        head = self.embedding if self.lm_head is None else self.lm_head
        assert head is not None
        return head

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, aux: Aux | None = None) -> Tensor:
        """Return hidden_TD after the last norm."""
        x_TD, update_TD = self.embed(tokens_T), None
        for block in self.blocks:
            x_TD, update_TD = block(x_TD, update_TD, positions_T, attend, aux)
        return self.norm(x_TD, update_TD)

    def stage(
        self, part: PartOfPass, stream_2TD: Tensor | None = None, blocks: Sequence[nn.Module] | None = None
    ) -> Tensor:
        """Compute this slice's layers without gradient: a pipeline stage of an engine.

        Args:
            stream_2TD: what the slice before returned; None for the first one, which embeds the tokens.
            blocks: compute these instead of all; the result is then of no use, but for the kernels it has loaded.

        Returns:
            hidden_TD from the last slice, after the last norm; from another one the residual stream and its update,
            stream_2TD. With deferred sums the update is this rank's part, which the next slice's rank of the same
            number goes on with.
        """
        x_TD, update_TD = (self.embed(part.tokens), None) if stream_2TD is None else (stream_2TD[0], stream_2TD[1])
        computed = self._in_one_call(x_TD, update_TD, part) if blocks is None else None
        x_TD, update_TD = computed or self._computed(x_TD, update_TD, part, blocks or self.blocks)
        return self.norm(x_TD, update_TD) if self.is_last else torch.stack([x_TD, update_TD])

    def _in_one_call(self, x_TD: Tensor, update_TD: Tensor | None, part: PartOfPass) -> tuple[Tensor, Tensor] | None:
        """Compute all blocks in one call; None where there is none for this pass."""
        if self.prepared is None:
            return None
        return part.attend.all_blocks(self.prepared, self.rope, x_TD, update_TD, part.positions)

    def _computed(
        self, x_TD: Tensor, update_TD: Tensor | None, part: PartOfPass, blocks: Iterable[nn.Module]
    ) -> tuple[Tensor, Tensor]:
        """Compute block by block."""
        for block in blocks:
            x_TD, update_TD = block(x_TD, update_TD, part.positions, part.attend)
        assert update_TD is not None, "a slice has a layer"
        return x_TD, update_TD

    def blocks_of_each_kind(self) -> list[Block]:
        """The first two blocks of each kind, in order. Their kernels are those of all blocks; the first block of a
        model has another norm than the next."""
        seen: Counter[tuple[int | None, type[nn.Module]]] = Counter()
        found = []
        for block in self.blocks:
            assert isinstance(block, Block)
            seen[block.kind] += 1
            if seen[block.kind] <= 2:
                found.append(block)
        return found

    def in_parts(self, parts: Sequence[PartOfPass]) -> Tensor:
        """Return hidden_TD of parts of one pass, one after the other in each layer.

        With deferred sums the ranks' values of one part are added beside the products of the next.
        """
        assert self.sums is not None, "without sums there is nothing to compute beside them"
        streams: list[tuple[Tensor, Tensor | None]] = [(self.embed(part.tokens), None) for part in parts]
        with self.sums.beside():
            for block in self.blocks:
                assert isinstance(block, Block)
                begun = [
                    block.attended(x_TD, update_TD, part.positions, part.attend)
                    for (x_TD, update_TD), part in zip(streams, parts, strict=True)
                ]
                streams = [
                    block.fed(x_TD, attended_TD, slots_T=part.attend.slots)
                    for (x_TD, attended_TD), part in zip(begun, parts, strict=True)
                ]
            return torch.cat([self.norm(x_TD, update_TD) for x_TD, update_TD in streams])

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Return the tokens' embeddings, x_TD."""
        assert self.embedding is not None, "the embedding belongs to the first slice"
        return self.embedding.embed(tokens_T)

    def norm(self, x_TD: Tensor, update_TD: Tensor | None) -> Tensor:
        """Return hidden_TD: the norm of the last block's result."""
        assert self.final_norm is not None, "the final norm belongs to the last slice"
        return self.final_norm.of_sum(x_TD, update_TD)[0]

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return logits_TV, whole on every rank, in the model's dtype or in float32 (see `Ops.logits`)."""
        return self.head.logits(hidden_TD)

    def dealt_logits(self, hidden_BD: Tensor) -> Tensor:
        """Return logits_bV of this rank's share of the rows, whose number the ranks of its group divide."""
        return self.head.dealt_logits(hidden_BD)

    def cross_entropy(self, hidden_TD: Tensor, targets_T: Tensor, weights_T: Tensor) -> CrossEntropy:
        """Compute output layer and loss together (see `Ops.cross_entropy`). The result is the same on every rank."""
        return self.head.cross_entropy(hidden_TD, targets_T, weights_T)

    @torch.no_grad()
    def pack_weights(self) -> None:
        """Bring the weights into the order that products without gradient read fastest: for serving, once, after
        loading.

        There is no way back: the parts table is gone.
        """
        if self.is_packed:
            return
        for module in self.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.pack()
        if self.is_last:
            self.head.pack()
        if self.ops.kernels == "compiled":
            gather(list(self.parameters()))
        self.is_packed = True
        weights = [block.weights() for block in self.blocks if isinstance(block, Block)]
        self.prepared = self.ops.prepare_blocks([found for found in weights if found]) if all(weights) else None

    def defer_sums(self, sums: GroupSums) -> None:
        """Leave the sums over the group to the norms that follow the products, and to `sums`: for serving, once.

        From then on a block's update is this rank's part. There is no gradient and no sequence parallelism.
        """
        self.sums = sums
        for module in self.modules():
            if isinstance(module, RowParallelLinear | VocabParallel | Norm | Experts):
                module.sums = sums

    def named_parts(self) -> Iterator[Part]:
        """Yield every Hugging Face tensor of which this rank holds a box, in the order of the forward pass."""
        if self.is_packed:
            raise ValueError("the weights were packed for serving: they can be neither read nor replaced any more")
        if self.embedding is not None:
            yield from self.embedding.parts("embedding")
        for index, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            yield from block.parts(f"blocks.{index}")
        if self.final_norm is not None:
            yield from self.final_norm.parts("final_norm")
        if self.lm_head is not None:
            yield from (replace(part, is_copy=self.has_table_copy) for part in self.lm_head.parts("lm_head"))

    def share_experts(self, peers: ExpertPeers) -> None:
        """Exchange rows with ranks that have other tokens and the other experts: for serving, once."""
        for experts in self.experts():
            experts.peers = peers

    def experts(self) -> Iterator[Experts]:
        """Yield the feed-forward parts with experts."""
        for module in self.modules():
            if isinstance(module, Experts):
                yield module

    def names_elsewhere(self) -> set[str]:
        """Return the tensors of these layers of which this rank holds nothing: other ranks' experts."""
        return {name for experts in self.experts() for name in experts.names_elsewhere()}

    def init_weights(self, seed: int) -> None:
        """Initialise: matrices normal with `initializer_range`, norms one, biases zero.

        A tensor's numbers depend on the seed, its name and the kind of device (CPU, CUDA) only, so every layout begins
        with the same model.
        """
        for part in self.named_parts():
            self.init_part(part, seed)

    @torch.no_grad()
    def init_part(self, part: Part, seed: int) -> None:
        """Initialise one part of the table, as `init_weights` does."""
        local = part.local()
        if part.is_adapter:
            init_adapter(part, seed)
        elif part.hf_name.endswith("norm.weight"):
            local.fill_(1)
        elif part.hf_name.endswith(".bias"):
            local.zero_()
        else:
            generator = named_generator(seed, part.hf_name, local.device)
            whole = torch.empty(part.global_shape, device=local.device)
            local.copy_(part.cut(whole.normal_(0, self.config.initializer_range, generator=generator)))


def init_adapter(part: Part, seed: int) -> None:
    """Initialise as PEFT does: A uniform within 1 / sqrt(input size), B zero, so that their product is zero."""
    local = part.local()
    if part.hf_name.endswith(".lora_B.weight"):
        local.zero_()
        return
    generator = named_generator(seed, part.hf_name, local.device)
    whole, bound = torch.empty(part.global_shape, device=local.device), part.global_shape[1] ** -0.5
    local.copy_(part.cut(whole.uniform_(-bound, bound, generator=generator)))


def check_layers(config: ModelConfig, layers: range | None) -> range:
    whole = range(config.num_layers)
    layers = whole if layers is None else layers
    if layers.step != 1 or not layers or layers.start < 0 or layers.stop > config.num_layers:
        raise ValueError(f"layers must be a run within 0..{config.num_layers}, not {layers}")
    return layers


def named_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
