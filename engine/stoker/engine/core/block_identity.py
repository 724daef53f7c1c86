"""What the blocks of an engine are, for other engines and for files that outlive it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from blake3 import blake3
from torch import nn

from stoker.engine.config import EngineConfig
from stoker.engine.execution.executor import Executor
from stoker.engine.execution.runner import Runner
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.data_executor import DataRank
from stoker.engine.ranks.executor import Ranks
from stoker.engine.transfer.checksum import raw_sums
from stoker.engine.transfer.fingerprint import Fingerprint, digest_of, root_digest
from stoker.engine.transfer.layout import BlockLayout
from stoker.model.tensor_group import group_rank, group_size
from stoker.pod.config_file import ConfigError

WEIGHT_SUFFIXES = (".safetensors", ".gguf")


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


def stored_identity(config: EngineConfig, plan: EnginePlan, runner: Runner, weights: str | None) -> BlockIdentity:
    """The identity of blocks that are kept in files. `weights`: as for `fingerprint_of`.

    Engines of other revisions and of other widths may read them, where all else is equal; engines that round
    differently may not: kernels count always, the tensor width where answers are to be deterministic.
    """
    facts = replace(fingerprint_of(config, runner, weights), revision="")
    layout = whole_layout(runner)
    computed: dict[str, object] = {"kernels": plan.kernels, "attention": plan.attention}
    computed["deterministic"] = [plan.tensor, config.parallelism.expert] if plan.deterministic else None
    all_facts = {"block": asdict(facts), "layout": asdict(layout), "computed": computed, "device": plan.device}
    return BlockIdentity(bytes.fromhex(digest_of(all_facts)), config.cache.salt or "", layout)


def whole_layout(runner: Runner) -> BlockLayout:
    """The layout of a block of all ranks together."""
    model = runner.model.config
    return replace(
        layout_of(runner), first_layer=0, end_layer=model.num_layers, first_head=0, end_head=model.num_kv_heads
    )


def layout_of(runner: Runner) -> BlockLayout:
    """The layout of one block of this rank."""
    _, layers, _, size, heads, dim = runner.cache.data.shape
    dtype = str(runner.cache.data.dtype).removeprefix("torch.")
    first, first_head = runner.cache.layers.start, 0
    if runner.model.group is not None:
        ranks = group_size(runner.model.group)
        copies = max(ranks // runner.model.config.num_kv_heads, 1)  # of a head, where there are more ranks than heads
        first_head = group_rank(runner.model.group) // copies * heads
    return BlockLayout(first, first + layers, size, first_head, first_head + heads, dim, dtype)


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


def shared_weights_digest(plan: EnginePlan, executor: Executor, field: str) -> str | None:
    """A digest of the weights that does not depend on how many ranks hold them; None: only one rank's numbers tell.

    `field`: of the configuration, that needs it.

    Raises:
        ConfigError: several ranks hold weights that have no digest and no files here.
    """
    known = plan.digest or plan.source_digest or files_digest(Path(plan.model_path))
    if known is None and isinstance(executor, Ranks | DataRank):
        raise ConfigError(f"{field} with several ranks needs model.digest for {plan.model_path}")
    return known


def files_digest(path: Path) -> str | None:
    """blake3 over the names and contents of a model's weight files, or of a checkpoint's manifest; None without."""
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    weights = [file for file in files if file.suffix in WEIGHT_SUFFIXES or file.name == "manifest.json"]
    if not weights:
        return None
    contents = {file.name: blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest() for file in weights}
    return digest_of({"files": contents})


def _sum(tensor: torch.Tensor) -> int:
    plain = tensor.to_dense() if tensor.is_mkldnn else tensor
    row_N = plain.detach().contiguous().cpu().view(-1).view(torch.uint8)
    padded_N = torch.nn.functional.pad(row_N, (0, -len(row_N) % 4))
    return int(raw_sums(padded_N.view(1, -1).numpy())[0])
