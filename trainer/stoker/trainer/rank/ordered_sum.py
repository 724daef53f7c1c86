"""The sum of the ranks' slices in fp32 and in a fixed order: recursive halving of the index.

With this order, the sum of 2, 4, 8, ... neighbouring rows is the same subtree, however many ranks hold them.

Called by `communicator`, `zero` and `clip`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.model.kernels.ops import Ops

KERNEL_RANKS = (1, 2, 4, 8)


def sum_in_order(rows: Sequence[Tensor], out: Tensor, *, add: bool = False) -> None:
    """Write the sum of the rows to `out` (fp32), or add it there with `add`.

    A single row may be `out` itself; fp32 rows may be overwritten. On a GPU it is one pass over the memory for 1, 2, 4
    or 8 ranks.
    """
    if not add and len(rows) == 1 and rows[0].data_ptr() == out.data_ptr():
        return
    if out.is_cuda and len(rows) in KERNEL_RANKS:
        from stoker.trainer.rank.ordered_sum_kernel import sum_rows

        sum_rows(rows, out, add)
    elif add:
        out.add_(_halving(rows))
    elif len(rows) == 1:
        out.copy_(rows[0])
    else:
        middle = len(rows) // 2
        torch.add(_halving(rows[:middle]), _halving(rows[middle:]), out=out)


def sum_and_square(rows: Sequence[Tensor], out: Tensor, ops: Ops, line: int, *, add: bool = False) -> Tensor:
    """Like `sum_in_order`, and return `ops.line_squares(out, line)`.

    With fused kernels on a GPU it is the same pass, and the same bits.
    """
    if out.is_cuda and ops.kernels == "fused" and len(rows) in KERNEL_RANKS[1:]:
        from stoker.trainer.rank.ordered_sum_kernel import sum_rows_and_square

        return sum_rows_and_square(rows, out, line, add)
    sum_in_order(rows, out, add=add)
    return ops.line_squares(out, line)


def _halving(rows: Sequence[Tensor]) -> Tensor:
    if len(rows) == 1:
        return rows[0].float()
    middle = len(rows) // 2
    return _halving(rows[:middle]).add_(_halving(rows[middle:]))
