"""What the blocks of an engine are, for other engines and for files that outlive it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from stoker.engine.config import EngineConfig
from stoker.engine.execution.runner import Runner
from stoker.engine.plan import EnginePlan
from stoker.engine.transfer.checksum import raw_sums
from stoker.engine.transfer.fingerprint import Fingerprint, digest_of, root_digest
from stoker.engine.transfer.layout import BlockLayout


@dataclass(frozen=True)
class BlockIdentity:
    """All but the tokens that a stored block's numbers depend on."""

    fingerprint: bytes
    """Of weights, model, type of keys and values, block size, layout, and the way they are computed."""
    salt: str
    """The tenant's."""
    layout: BlockLayout

    @property
    def root(self) -> bytes:
        """The parent of first blocks' contents."""
        return root_digest(self.fingerprint, self.salt)


def stored_identity(config: EngineConfig, plan: EnginePlan, runner: Runner) -> BlockIdentity:
    """The identity of blocks that are kept in files.

    Engines of other revisions may read them, where all else is equal; engines that round differently may not, so that
    deterministic answers stay so.
    """
    facts = replace(fingerprint_of(config, runner, plan.digest or plan.source_digest), revision="")
    layout = layout_of(runner)
    computed = {"kernels": plan.kernels, "attention": plan.attention, "deterministic": plan.deterministic}
    all_facts = {"block": asdict(facts), "layout": asdict(layout), "computed": computed, "device": plan.device}
    return BlockIdentity(bytes.fromhex(digest_of(all_facts)), config.cache.salt or "", layout)


def layout_of(runner: Runner) -> BlockLayout:
    """The layout of one block of this rank."""
    _, layers, _, size, heads, dim = runner.cache.data.shape
    dtype = str(runner.cache.data.dtype).removeprefix("torch.")
    first = runner.cache.layers.start
    return BlockLayout(first, first + layers, size, 0, heads, dim, dtype)


def fingerprint_of(config: EngineConfig, runner: Runner, weights: str | None) -> Fingerprint:
    """What this engine's blocks depend on. `weights`: their digest; None: it is computed from the loaded numbers."""
    model = runner.model.config
    return Fingerprint(
        weights=weights or weights_digest(runner.model),
        revision=config.identity.revision,
        model=digest_of({name: str(value) for name, value in asdict(model).items()}),
        kv_dtype=str(runner.cache.data.dtype).removeprefix("torch."),
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )


def weights_digest(model: nn.Module) -> str:
    """A digest of the loaded numbers, for weights that come without one: the checksum of every tensor, by name."""
    sums = {name: (str(tensor.dtype), list(tensor.shape), _sum(tensor)) for name, tensor in model.named_parameters()}
    return digest_of(sums)


def _sum(tensor: torch.Tensor) -> int:
    plain = tensor.to_dense() if tensor.is_mkldnn else tensor
    row_N = plain.detach().contiguous().cpu().view(-1).view(torch.uint8)
    padded_N = torch.nn.functional.pad(row_N, (0, -len(row_N) % 4))
    return int(raw_sums(padded_N.view(1, -1).numpy())[0])
