"""What the loop needs of a target of metrics, and the numbers that targets get."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from stoker.trainer.errors import StorageFailed
from stoker.trainer.protocol.messages import StepEvent, ValidationEvent

STEP_NAMES = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "tokens_per_s": "train/tokens_per_s",
    "step_s": "train/step_s",
    "tokens": "train/tokens",
    "skipped_steps": "train/skipped_steps",
    "loss_scale": "train/loss_scale",
    "router_balance_loss": "train/router_balance_loss",
    "router_z_loss": "train/router_z_loss",
    "expert_imbalance": "train/expert_imbalance",
}
"""Field of a step -> its name in a target. A step without a value has no such number."""
VALIDATION_LOSS = "validation/loss"


class MetricTarget(Protocol):
    """Takes the numbers of steps and validations. A StorageFailed ends the attempt as a storage error."""

    def write(self, step: int, numbers: dict[str, float], at: float) -> None:
        """Write some numbers of one step; `at`: Unix time."""
        ...

    def close(self, completed: bool) -> None:
        """Write what is held back. `completed`: the run took its last step."""
        ...


def step_numbers(event: StepEvent) -> dict[str, float]:
    """The numbers of a step that it has: a gradient that overflowed has no norm."""
    values = {name: getattr(event, field) for field, name in STEP_NAMES.items()}
    return {name: float(value) for name, value in values.items() if value is not None}


def validation_numbers(event: ValidationEvent) -> dict[str, float]:
    return {VALIDATION_LOSS: event.loss}


@contextmanager
def place_in_errors(place: str) -> Iterator[None]:
    """Turn what a package, a server or its network raises into StorageFailed with the place, which an operator retries.

    `place`: the field, with its value.
    """
    try:
        yield
    except Exception as error:
        raise StorageFailed(f"{place}: {type(error).__name__}: {error}") from error
