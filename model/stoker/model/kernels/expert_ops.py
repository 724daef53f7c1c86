"""The operations of layers with experts: part of `Ops`, one method per op.

T tokens, D hidden, E experts, K experts of a token, S = T * K rows.
"""

from __future__ import annotations

from torch import Tensor

from stoker.model.kernels.expert_rows import ExpertRows, Routes
from stoker.model.kernels.expert_weights import ExpertWeights
from stoker.model.kernels.kernel_set import Kernels
from stoker.model.kernels.operand_checks import check_combine, check_experts, check_grouped_linear, check_route


class ExpertOps:
    """Choice of experts, their products and the sums of their results."""

    impl: Kernels
    """The kernels that were chosen."""

    def experts(self, x_TD: Tensor, weights: ExpertWeights, slots_T: Tensor | None = None) -> Tensor | None:
        """Return the weighted sum of each token's experts, y_TD, by kernels for a whole layer; without gradient.

        None where there are none: the caller then calls the single operations, which give the same but for rounding.

        Args:
            x_TD: the rows.
            weights: of router and experts.
            slots_T: int32; rows with a number below 0 are padding, whose results are undefined, and need no experts.
        """
        check_experts(x_TD, weights, slots_T)
        return self.impl.experts(x_TD, weights, slots_T)

    def norm_experts(
        self,
        x_TD: Tensor,
        update_TD: Tensor | None,
        norm_D: Tensor,
        eps: float,
        weights: ExpertWeights,
        slots_T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Return (experts(norm(x + update)), x + update), or None as `experts` does."""
        check_experts(x_TD, weights, slots_T)
        return self.impl.norm_experts(x_TD, update_TD, norm_D, eps, weights, slots_T)

    def route(self, logits_TE: Tensor, num_choices: int, normalise: bool) -> Routes:
        """Choose the most probable experts of each token; softmax over all experts, in float32, differentiable.

        `normalise`: the weights of a token's experts add up to one.
        """
        check_route(logits_TE, num_choices)
        return self.impl.route(logits_TE, num_choices, normalise)

    def dispatch(self, x_TD: Tensor, rows: ExpertRows) -> Tensor:
        """Return the tokens in the order in which experts compute, x_SD: one row for each choice of each token."""
        if x_TD.shape[0] * rows.num_choices != len(rows.sources):
            raise ValueError(f"dispatch: x {tuple(x_TD.shape)} does not fit {len(rows.sources)} rows")
        return self.impl.dispatch(x_TD, rows)

    def grouped_linear(self, x_SD: Tensor, weight_RD: Tensor, ends_E: Tensor) -> Tensor:
        """Return y_SO: each expert's run of rows times its own weight, transposed.

        Rows behind the last end are no expert's: their results are undefined.

        Args:
            x_SD: rows sorted by expert.
            weight_RD: the weights of the E experts one below the other, R = E * O rows.
            ends_E: int32, where each expert's run of rows ends; not below the one before.
        """
        check_grouped_linear(x_SD, weight_RD, ends_E)
        return self.impl.grouped_linear(x_SD, weight_RD, ends_E)

    def combine(self, y_SD: Tensor, weights_TK: Tensor, rows: ExpertRows) -> Tensor:
        """Return each token's weighted sum over its experts, y_TD; summed in float32, in the order of its choices."""
        check_combine(y_SD, weights_TK, rows)
        return self.impl.combine(y_SD, weights_TK, rows)
