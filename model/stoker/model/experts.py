"""The feed-forward part of a layer with experts: a router chooses a few of them for each token.

All choices of all tokens are computed; no expert has a capacity. T tokens, t tokens of this rank, D hidden, E experts,
K experts of a token, S = T * K rows, R rows that this rank's experts compute, F width of an expert.

Made by `block`. Parameters change by the trainer's optimizer and by the loaders of `weights`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from stoker.model.aux import Aux
from stoker.model.config import ModelConfig
from stoker.model.expert_exchange import plan_exchange, return_rows, send_rows
from stoker.model.expert_peers import ExpertCut, ExpertPeers
from stoker.model.group_sums import GroupSums
from stoker.model.hosted_experts import HostedExperts
from stoker.model.kernels.expert_rows import Routes, count_rows, sort_own_rows, sort_rows
from stoker.model.kernels.expert_weights import ExpertWeights
from stoker.model.kernels.ops import Ops
from stoker.model.lora import AdaptedTensor, LoraAdapter, LoraSettings
from stoker.model.parallel import Norm
from stoker.model.parameter import Part
from stoker.model.pinned import pinned_memory
from stoker.model.tensor_group import (
    copy_to_group,
    counted_once,
    gather_tokens,
    gather_tokens_of_whole,
    group_rank,
    group_size,
    reduce_from_group,
    scatter_tokens,
    take_tokens,
)

BALANCE, Z, TOKENS = "router balance loss", "router z loss", "tokens per expert"
"""Names of what leaves through `aux`: two losses, and int64 [E]."""


class Experts(nn.Module):
    """Router and experts of layer `layer`.

    With an expert group every rank holds a run of whole experts, and rows are exchanged. Without one every rank holds
    a slice of every expert, cut over the tensor-parallel group like a dense layer. For serving, `expert_runs` deals the
    experts out over that group in so many runs, and only the ranks of a run cut its experts: no rows are exchanged,
    because every rank has all tokens, and the sum over the group adds the runs. `expert_cut`, for serving too, deals
    them out over ranks with other tokens, whose rows `peers` exchanges. With `experts_on_device`, for serving
    too, the parameters are in host memory, and the device has slots for so many of this rank's experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: ProcessGroup | None,
        sequence_parallel: bool = False,
        expert_group: ProcessGroup | None = None,
        expert_runs: int = 1,
        expert_cut: ExpertCut | None = None,
        experts_on_device: int | None = None,
    ) -> None:
        """Raises ValueError with the arithmetic where experts, or an expert's width, cannot be cut evenly, and for
        more experts on the device than this rank holds."""
        super().__init__()
        names = config.family.experts
        assert names is not None
        assert config.num_experts is not None
        assert config.num_experts_per_token is not None
        self.ops, self.group, self.expert_group, self.layer, self.names = ops, group, expert_group, layer, names
        self.sequence_parallel = sequence_parallel
        self.hf_name = f"model.layers.{layer}.{names.part}"
        self.num_experts, self.num_choices = config.num_experts, config.num_experts_per_token
        self.normalise, self.hidden, self.width = config.norm_topk_prob, config.hidden_size, config.expert_size
        share = expert_share(group, expert_group, expert_runs, expert_cut)
        self.own = own_experts(self.num_experts, share.run, share.runs)
        """Numbers of the experts that this rank holds."""
        self.is_run = share.runs > 1
        self.slice = share.slice
        self.local_width = even_part(self.width, share.slices, f"{self.hf_name}.experts")

        self.is_hosted = experts_on_device is not None

        def parameter(rows: int, columns: int) -> nn.Parameter:
            made = host_memory if self.is_hosted else torch.empty
            return nn.Parameter(made(rows, columns, dtype=dtype, device=device))

        self.router = nn.Parameter(torch.empty(self.num_experts, self.hidden, dtype=dtype, device=device))
        self.gate_up = parameter(len(self.own) * 2 * self.local_width, self.hidden)
        """Rows of gate, then of up, expert by expert."""
        self.down = parameter(len(self.own) * self.hidden, self.local_width)
        self.hosted: HostedExperts | None = None
        if experts_on_device is not None:
            weights = self.gate_up, self.down
            self.hosted = HostedExperts(*weights, self.own, self.num_experts, experts_on_device, device)
        self.adapters = nn.ModuleDict()
        """By `gate`, `up` and `down`; each has all experts of this rank."""
        self.sums: GroupSums | None = None
        """Set where the norm that follows adds the ranks' parts (`Decoder.defer_sums`)."""
        self.peers: ExpertPeers | None = None
        """Set where ranks with other tokens have the other experts (`Decoder.share_experts`)."""

    def forward(
        self, norm: Norm, x_tD: Tensor, attended_tD: Tensor, aux: Aux | None = None, slots_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (experts(norm(x + attended)), x + attended). `slots_T`: `Attend.slots`."""
        if self.group is None and self.is_alone(aux):
            whole = self.ops.norm_experts(x_tD, attended_tD, norm.weight, norm.eps, self.weights, slots_T)
            if whole is not None:
                return whole
        normed_tD, x_tD = norm.of_sum(x_tD, attended_tD)
        return self.compute(normed_tD, aux, slots_T), x_tD

    def is_alone(self, aux: Aux | None) -> bool:
        """Whether only the result of this layer matters, and rows are computed here by weights as they are."""
        whole = self.expert_group is None and self.peers is None and not self.sequence_parallel
        return aux is None and whole and not self.adapters

    @property
    def weights(self) -> ExpertWeights:
        """The parameters as kernels take them, anew because they may have been replaced or gathered."""
        matrices = self.router, self.gate_up, self.down
        return ExpertWeights(*matrices, self.num_choices, self.normalise, self.own.start, self.hosted)

    def compute(self, x_tD: Tensor, aux: Aux | None = None, slots_T: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each token's experts, y_tD."""
        if self.is_alone(aux) and (y_TD := self.ops.experts(x_tD, self.weights, slots_T)) is not None:
            return self.sums.begin(y_TD) if self.sums is not None else reduce_from_group(y_TD, self.group)
        # The router is computed on all tokens by each rank of tp, so its losses are those of the whole micro-batch.
        whole_TD = gather_tokens_of_whole(x_tD, self.group) if self.sequence_parallel else x_tD
        weights_TK, experts_TK = routes = self.choose(whole_TD, aux)
        if self.peers is not None:
            return self.compute_with_peers(whole_TD, routes, self.peers)
        if self.expert_group is not None:
            return self.compute_own_tokens(x_tD, weights_TK, experts_TK, self.expert_group)
        if self.is_run or self.hosted is not None:
            return self.compute_own_run(x_tD, weights_TK, experts_TK)
        # Each rank computes a slice of every expert: gradients of tokens and weights are sums over tp.
        enter, leave = (gather_tokens, scatter_tokens) if self.sequence_parallel else (copy_to_group, reduce_from_group)
        rows, weights_TK = sort_rows(experts_TK, self.num_experts), copy_to_group(weights_TK, self.group)
        y_SD = self.products(self.ops.dispatch(enter(x_tD, self.group), rows), rows.ends)
        y_TD = self.ops.combine(y_SD, weights_TK, rows)
        return self.sums.begin(y_TD) if self.sums is not None else leave(y_TD, self.group)

    def choose(self, x_TD: Tensor, aux: Aux | None) -> Routes:
        """Choose each token's experts; the router's losses and loads leave through `aux`."""
        # Two bytes would make many logits equal: the router's product is in float32 whatever the model's dtype.
        logits_TE = self.ops.linear(x_TD.float(), counted_once(self.router, self.group).float())
        routes = self.ops.route(logits_TE, self.num_choices, self.normalise)
        return routes if aux is None else note_routing(aux, self.layer, logits_TE, routes)

    def compute_own_tokens(
        self, x_tD: Tensor, weights_TK: Tensor, experts_TK: Tensor, expert_group: ProcessGroup
    ) -> Tensor:
        """Exchange the rows of this rank's tokens over the expert group. Tokens that tp repeats are cut over it."""
        repeated = None if self.sequence_parallel else self.group
        x_tD, weights_tK = take_tokens(x_tD, repeated), take_tokens(weights_TK, self.group)
        rows = sort_rows(take_tokens(experts_TK, self.group), self.num_experts)
        exchange = plan_exchange(rows.ends, expert_group)
        y_RD = self.products(send_rows(self.ops.dispatch(x_tD, rows), exchange), exchange.ends)
        y_tD = self.ops.combine(return_rows(y_RD, exchange), weights_tK, rows)
        return gather_tokens_of_whole(y_tD, repeated)

    def compute_with_peers(self, x_TD: Tensor, routes: Routes, peers: ExpertPeers) -> Tensor:
        """Compute own experts for the tokens of all ranks, and return the sum of the ranks' parts of own tokens."""
        gathered = peers.gather(x_TD, routes)
        return peers.give_back(self.compute_own_run(gathered.x, *gathered.routes))

    def serve_peers(self, peers: ExpertPeers, tokens: int = 0) -> None:
        """Compute own experts for the others' tokens. `tokens`: of this rank, whose step has failed: they count as
        zeros."""
        x_TD = self.router.new_zeros(tokens, self.hidden)
        weights_TK = torch.zeros(tokens, self.num_choices, device=x_TD.device)
        self.compute_with_peers(x_TD, Routes(weights_TK, torch.zeros_like(weights_TK, dtype=torch.int64)), peers)

    def compute_own_run(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        """Return the part of each token's sum that this rank's experts give, or the sum over the group; no gradient."""
        rows, ends_E = sort_own_rows(experts_TK, self.own)
        x_SD = self.ops.dispatch(x_TD, rows)
        y_SD = self.products(x_SD, ends_E) if self.hosted is None else self.from_slots(x_SD, experts_TK, self.hosted)
        behind_S1 = torch.arange(len(y_SD), device=y_SD.device).unsqueeze(1) >= ends_E[-1]
        y_TD = self.ops.combine(y_SD.masked_fill_(behind_S1, 0), weights_TK, rows)  # what is behind is undefined
        return self.sums.begin(y_TD) if self.sums is not None else reduce_from_group(y_TD, self.group)

    def from_slots(self, x_SD: Tensor, experts_TK: Tensor, hosted: HostedExperts) -> Tensor:
        """Return what `products` returns, bit for bit: round by round, expert by expert."""
        turn, y_SD = hosted.turn(experts_TK), torch.empty_like(x_SD)
        gate_up_SF = x_SD.new_empty(len(x_SD), 2 * self.local_width)
        ends = list(itertools.accumulate(turn.counts))
        for one in hosted.arriving(turn):
            runs = [(slot, slice(ends[expert] - turn.counts[expert], ends[expert])) for expert, slot in one.places]
            for slot, rows in runs:
                gate_up_SF[rows] = self.product(x_SD[rows], hosted.weights_of(slot)[0])
            activated_SF = self.ops.swiglu(gate_up_SF)  # of all rows: its bits depend on an element's place
            for slot, rows in runs:
                y_SD[rows] = self.product(activated_SF[rows], hosted.weights_of(slot)[1])
        return y_SD

    def product(self, x_RD: Tensor, weight_OD: Tensor) -> Tensor:
        """Return the rows of one expert times its weight."""
        end_1 = torch.tensor([len(x_RD)], dtype=torch.int32, device=x_RD.device)
        return self.ops.grouped_linear(x_RD, weight_OD, end_1)

    def products(self, x_SD: Tensor, ends_E: Tensor) -> Tensor:
        """Return the experts' results for rows sorted by expert."""
        gate_up_SF = self.ops.grouped_linear(x_SD, self.gate_up, ends_E)
        if "gate" in self.adapters or "up" in self.adapters:
            halves = zip(("gate", "up"), torch.split(gate_up_SF, self.local_width, 1), strict=True)
            gate_up_SF = torch.cat([self._adapted(name, x_SD, y_SF, ends_E) for name, y_SF in halves], 1)
        activated_SF = self.ops.swiglu(gate_up_SF)
        y_SD = self.ops.grouped_linear(activated_SF, self.down, ends_E)
        return self._adapted("down", activated_SF, y_SD, ends_E)

    def _adapted(self, name: str, x_SD: Tensor, y_SE: Tensor, ends_E: Tensor) -> Tensor:
        """Add what the adapters of a projection give, if it has some."""
        if name not in self.adapters:
            return y_SE
        adapter = self.adapters[name]
        assert isinstance(adapter, LoraAdapter)
        return y_SE + adapter.of_experts(x_SD, ends_E)

    def add_adapters(self, settings: LoraSettings) -> None:
        """Add an adapter to each expert's projections that the settings name, whatever their Hugging Face names are.

        Raises ValueError for experts in host memory.
        """
        if self.hosted is not None:
            raise ValueError(f"{self.hf_name}: adapters of experts in host memory are not supported")
        names = {"gate": self.names.gate, "up": self.names.up, "down": self.names.down}
        for projection, hf_name in names.items():
            if f"{projection}_proj" in settings.targets:
                tensors = [self._adapted_tensor(expert, projection, hf_name) for expert in self.own]
                self.adapters[projection] = LoraAdapter(settings, tensors[0], self.ops, self.gate_up, *tensors[1:])

    def _adapted_tensor(self, expert: int, projection: str, hf_name: str) -> AdaptedTensor:
        """Return this rank's box of one matrix of an expert. `down` is cut by columns, the others by rows."""
        name, begin = f"{self.hf_name}.experts.{expert}.{hf_name}", self.local_width * self.slice
        whole, size, start = (self.width, self.hidden), (self.local_width, self.hidden), (begin, 0)
        if projection == "down":
            whole, size, start = whole[::-1], size[::-1], start[::-1]
        return AdaptedTensor(hf_name=name, shape=whole, start=start, size=size, shard_dim=int(projection == "down"))

    def held_by_expert(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that belong to the experts, not to the router."""
        yield from (self.gate_up, self.down, *self.adapters.parameters())

    def names_elsewhere(self) -> Iterator[str]:
        """Yield the names of the tensors that only other ranks of the expert group hold."""
        for expert in set(range(self.num_experts)) - set(self.own):
            for name in (self.names.gate, self.names.up, self.names.down):
                yield f"{self.hf_name}.experts.{expert}.{name}.weight"

    def parts(self, prefix: str) -> Iterator[Part]:
        """Yield the router, then gate, up and down of each expert that this rank holds."""
        shape = (self.num_experts, self.hidden)
        yield Part(f"{self.hf_name}.gate.weight", f"{prefix}.router", self.router, 0, shape[0], shape, (0, 0), None)
        for place in range(len(self.own)):
            yield from self.gate_up_parts(prefix, place)
        for place in range(len(self.own)):
            yield self.down_part(prefix, place)

    def gate_up_parts(self, prefix: str, place: int) -> Iterator[Part]:
        begin = self.local_width * self.slice
        for number, name in enumerate((self.names.gate, self.names.up)):
            row = (2 * place + number) * self.local_width
            yield Part(
                f"{self.hf_name}.experts.{self.own[place]}.{name}.weight",
                f"{prefix}.gate_up",
                self.gate_up,
                row,
                row + self.local_width,
                (self.width, self.hidden),
                (begin, 0),
                0,
            )

    def down_part(self, prefix: str, place: int) -> Part:
        return Part(
            f"{self.hf_name}.experts.{self.own[place]}.{self.names.down}.weight",
            f"{prefix}.down",
            self.down,
            place * self.hidden,
            (place + 1) * self.hidden,
            (self.hidden, self.width),
            (0, self.local_width * self.slice),
            1,
        )


class ExpertShare(NamedTuple):
    """What one rank holds: one of `runs` of the experts, and of these one of `slices` of their width."""

    run: int
    runs: int
    slice: int
    slices: int


def expert_share(
    group: ProcessGroup | None, expert_group: ProcessGroup | None, expert_runs: int, expert_cut: ExpertCut | None = None
) -> ExpertShare:
    """Return the share of this rank. Raises ValueError where the runs do not divide the tensor-parallel group."""
    if expert_cut is not None:
        return ExpertShare(*expert_cut, 0, 1)
    if expert_group is not None:
        return ExpertShare(group_rank(expert_group), group_size(expert_group), 0, 1)
    slices = even_part(group_size(group), expert_runs, "tensor parallel size")
    rank = group_rank(group)
    return ExpertShare(rank // slices, expert_runs, rank % slices, slices)


def host_memory(rows: int, columns: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return host memory for weights, page-locked where a GPU copies them."""
    if device.type == "cuda":
        return pinned_memory(rows * columns, dtype).view(rows, columns)
    return torch.empty(rows, columns, dtype=dtype)


def even_part(total: int, parts: int, name: str) -> int:
    """Return one part. Raises ValueError with the arithmetic where the cut is not even."""
    if total % parts:
        raise ValueError(f"{name}: {total} cannot be cut into {parts} parts: {total} % {parts} = {total % parts}")
    return total // parts


def own_experts(num_experts: int, run: int, runs: int) -> range:
    """Return one run of the experts."""
    if num_experts % runs:
        raise ValueError(
            f"expert: {num_experts} experts cannot be cut over {runs} ranks: {num_experts} % {runs} = "
            f"{num_experts % runs}"
        )
    size = num_experts // runs
    return range(run * size, (run + 1) * size)


def note_routing(aux: Aux, layer: int, logits_TE: Tensor, routes: Routes) -> Routes:
    """Put the router's losses and the tokens of each expert into `aux`; return routes whose weights carry the losses.

    The balance loss is the one of Switch Transformer (arXiv 2101.03961, equations 4 to 6): E times the sum over experts
    of the share of tokens times the mean probability; K where both are even. The z loss is the one of ST-MoE
    (arXiv 2202.08906, equation 5): the mean square of the logarithm of the softmax's normaliser.

    Both are means over all tokens of the micro-batch. A rank that has a share of them gives its part of the losses: the
    share of tokens of an expert is that of all ranks, the other means are sums over the rank's own.
    """
    num_tokens, num_experts = logits_TE.shape
    shares = aux.num_shares
    tokens_E = count_rows(routes.experts.flatten(), num_experts)
    all_tokens_E = aux.sum_of_shares(tokens_E)
    probabilities_E = logits_TE.softmax(-1).mean(0) / shares
    aux.put(layer, TOKENS, tokens_E)
    balance = (all_tokens_E * probabilities_E).sum() * (num_experts / (num_tokens * shares))
    losses = {BALANCE: balance, Z: logits_TE.logsumexp(-1).square().mean() / shares}
    return routes._replace(weights=aux.carry(routes.weights, layer, losses))
