"""Makes the attention of each micro-batch: over whole documents, or over documents that several ranks share.

Made by `build`; used by the passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from stoker.model.attend import Attend, PackedAttend
from stoker.model.context_attend import ContextAttend
from stoker.model.kernels.ops import Ops
from stoker.pod.capabilities import AttentionName, ContextMethod
from stoker.trainer.rank.data.batch import MicroBatch


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share sequences, and how they exchange keys and values."""

    group: ProcessGroup
    method: ContextMethod


@dataclass(frozen=True)
class AttendMaker:
    """`attention`: auto, or what `Ops.attention` gave."""

    ops: Ops
    attention: AttentionName
    device: torch.device
    context: ContextGroup | None = None

    def of(self, batch: MicroBatch) -> Attend:
        """Return the attention of a micro-batch. Its bounds stay on the host: they are read there without a wait."""
        bounds, longest = torch.as_tensor(batch.cu_seqlens), batch.max_seqlen
        if self.context is None:
            return PackedAttend(self.ops, self.attention, bounds, longest, self.device)
        shared = self.context
        return ContextAttend(self.ops, self.attention, shared.method, shared.group, bounds, longest, self.device)
