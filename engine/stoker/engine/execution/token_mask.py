"""Masks of allowed tokens, applied to rows of logits: every other token's logit becomes -inf.

Plain tensor operations, so the same on every device and beside every sampler. R masked rows, B rows, V vocabulary.

Called by the runner and the sampler, after the raw log-probabilities were taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

BITS = 8


def mask_logits(logits_BV: Tensor, seats_B: np.ndarray, masks: Mapping[int, bytes]) -> Tensor:
    """Return the logits with the masks of their seats applied. `masks`: seat -> bits, as in `SeatMask`."""
    masked = [row for row, seat in enumerate(seats_B.tolist()) if seat in masks]
    if not masked:
        return logits_BV
    bits_RW = np.stack([np.frombuffer(masks[int(seats_B[row])], dtype=np.uint8) for row in masked])
    device = logits_BV.device
    rows_R = torch.tensor(masked).to(device, non_blocking=True)
    allowed_RV = unpacked(torch.from_numpy(bits_RW).to(device, non_blocking=True), logits_BV.shape[1])
    return logits_BV.index_copy(
        0, rows_R, logits_BV.index_select(0, rows_R).masked_fill(allowed_RV.logical_not_(), -math.inf)
    )


def unpacked(bits_RW: Tensor, vocab_size: int) -> Tensor:
    """[R, V] bool from [R, bytes]; the lowest bit of a byte comes first."""
    places = torch.arange(BITS, dtype=torch.uint8, device=bits_RW.device)
    allowed = (bits_RW.unsqueeze(2) >> places) & 1
    return allowed.flatten(1)[:, :vocab_size].bool()
