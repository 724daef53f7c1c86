"""The draw of a step's tokens from hidden states, within a graph or without.

Over tensor ranks a long list of rows is dealt: each rank gets whole rows of logits, its share of them, draws their
tokens, and all ranks collect the tokens. That exchanges one share of the logits instead of all of them, and each rank
samples its share instead of everything. A row's token depends on its own logits alone, so it is the same either way.
B rows, b of them one rank's, D hidden.

Called by the step graphs, and by the runner for samples beside prompts.
"""

from __future__ import annotations

from torch import Tensor

from stoker.model.decoder import Decoder
from stoker.model.group_sums import GroupSums
from stoker.model.kernels.sampling import SampledTokens, SampleRows, SamplingTable

SHARE_ROWS = 8
"""Fewest rows of a rank that are worth a second exchange."""


def draw(model: Decoder, hidden_BD: Tensor, rows: SampleRows, table: SamplingTable) -> SampledTokens:
    """Return the rows' tokens, the same on every rank. Nothing is written to seats."""
    sums = model.sums
    if sums is None or not deals(len(hidden_BD), sums.size):
        return model.ops.sample(model.logits(hidden_BD), rows, table, None, None)
    own = sums.own_rows(len(hidden_BD))
    # copies are aligned for any share: kernels of all ranks are those that one rank compiles
    dealt = SampleRows(rows.seats[own].clone(), rows.positions[own].clone(), rows.filtered)
    return collected(model.ops.sample(model.dealt_logits(hidden_BD), dealt, table, None, None), sums)


def deals(num_rows: int, ranks: int) -> bool:
    return num_rows % ranks == 0 and num_rows >= ranks * SHARE_ROWS


def collected(sampled: SampledTokens, sums: GroupSums) -> SampledTokens:
    """The tokens of all ranks' rows, in one exchange: the lowest bit says whether a row was valid."""
    packed_B = sums.collect_rows(sampled.tokens * 2 + sampled.valid)
    return SampledTokens(packed_B >> 1, (packed_B & 1).bool())
