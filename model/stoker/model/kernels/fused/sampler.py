"""Choice of the next tokens without a sort and without a copy to the host.

A row is cut into splits of a fixed size, so its token does not depend on its batch. Plain sampling reads the logits
once: `scan` gives each split's maximum and its sum of weights, `draw` finds the split and then the token where the
cumulative sum passes the random number, in the order of the vocabulary. With top-k, top-p or min-p `limits` stands
between: it finds the smallest logit that is left, in a range that is made narrower until few logits lie in it, and puts
in place of the splits' sums those of what is left. Rows without a limit keep theirs, so that they draw the same token
beside any other row. B rows, S seats, V vocabulary, L longest sequence.

Called through `Ops` by the engine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.model.kernels.fused.sampling.adjustment import adjust
from stoker.model.kernels.fused.sampling.draw import draw
from stoker.model.kernels.fused.sampling.limits import apply_limits
from stoker.model.kernels.fused.sampling.scan import make_scan, sum_splits
from stoker.model.kernels.sampling import Adjustments, SampledTokens, SampleRows, SamplingTable


def sample(
    logits_BV: Tensor,
    rows: SampleRows,
    table: SamplingTable,
    adjustments: Adjustments | None,
    into_SL: Tensor | None,
) -> SampledTokens:
    num_rows, device = logits_BV.shape[0], logits_BV.device
    tokens_B = torch.empty(num_rows, dtype=torch.int64, device=device)
    valid_B = torch.empty(num_rows, dtype=torch.bool, device=device)
    if not num_rows:
        return SampledTokens(tokens_B, valid_B)
    logits = logits_BV.float()  # narrower ones would be added in another order than those that were adjusted
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if adjustments is not None:
        logits = adjust(logits, rows, table, adjustments)
    scan = make_scan(logits, rows, table)
    sum_splits(scan)
    if rows.filtered:
        apply_limits(scan)
    draw(scan, rows, table, SampledTokens(tokens_B, valid_B), into_SL)
    return SampledTokens(tokens_B, valid_B)
