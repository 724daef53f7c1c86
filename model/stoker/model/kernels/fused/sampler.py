"""Choosing the next tokens without a sort and without a word to the host.

A row is cut into splits of a fixed size, so its token does not depend on its batch. Plain sampling reads the logits once: `scan` gives each split's maximum and its sum of weights,
`draw` finds the split and then the token where the cumulative sum passes the random number, in the order of the vocabulary. With top-k, top-p or min-p four steps stand between: `bound` finds
a logit that cannot lie above the row's threshold, `gather_candidates` takes the logits from there on, mostly a few hundred, `threshold` searches among them (among all where they are too many), and a second scan sums
what is left. Rows without a threshold keep the sums of the first scan, so that they draw the same token beside any other row. B rows, S seats, V vocabulary, L longest sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker.model.kernels.fused.sampling.adjustment import adjust
from stoker.model.kernels.fused.sampling.draw import draw
from stoker.model.kernels.fused.sampling.limits import find_thresholds
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
    sum_splits(scan, filtered=False)
    if rows.filtered:
        find_thresholds(scan)
        sum_splits(scan, filtered=True)
    draw(scan, rows, table, SampledTokens(tokens_B, valid_B), into_SL)
    return SampledTokens(tokens_B, valid_B)
