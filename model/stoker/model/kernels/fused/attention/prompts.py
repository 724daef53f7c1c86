"""Attention of long prompts over the cache by flash-attn-4, which reads keys that lie one after another.

Copying them out of the blocks takes one to two hundredths of the attention's own time where chunks are large (8 of 785
us for a prompt of 8,192 tokens would be the memory's limit), so whole prompts and chunks with context take one path.

T tokens, N heads, K kv heads, H head_dim.

Reads the cache; called by `paged`.
"""

from __future__ import annotations

from torch import Tensor

from stoker.model.kernels.fused.attention.gather import gather_keys
from stoker.model.kernels.long_prompts import LongPrompts


def attend_long_prompts(
    q_TNH: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    prompts: LongPrompts,
    scale: float,
    window: int | None,
    out_TNH: Tensor,
) -> Tensor:
    """Return out_TNH with the rows of all groups filled in, or a new tensor where one group is the whole step.

    k and v are [blocks, block_size, K, H] views of one layer, `block_tables` [S, B].
    """
    for starts in prompts.groups:
        group = starts.group
        keys_LKH, values_LKH = prompts.keys[: group.num_keys], prompts.values[: group.num_keys]
        tables = block_tables[group.first : group.end]
        gather_keys(k, v, tables, starts.key_start, group.longest[1], keys_LKH, values_LKH)
        rows = slice(*group.rows)
        found_TNH = prompts.attend(
            q_TNH[rows], keys_LKH, values_LKH, starts.query_start, starts.key_start, group.longest, scale, window
        )
        if len(found_TNH) == len(out_TNH):
            return found_TNH
        out_TNH[rows] = found_TNH
    return out_TNH
