"""Room for one more model: which loaded ones must go first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class NoRoom(ValueError):
    """The model does not fit, whatever else is unloaded."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that takes memory."""

    name: str
    num_bytes: int
    used_s: float
    """When it was asked for last."""


def models_to_unload(
    needed_bytes: int, free_bytes: int | None, loaded: Sequence[LoadedModel], max_models: int
) -> tuple[str, ...]:
    """The models to unload, those first that have not been asked for the longest.

    Args:
        needed_bytes: of the new model.
        free_bytes: memory that it can have now; None: unknown, so only `max_models` counts.
        loaded: models that are loaded or loading.
        max_models: most models at one time.

    Raises:
        NoRoom: it would not fit alone.
    """
    rest = sorted(loaded, key=lambda model: model.used_s)
    gone: list[LoadedModel] = []

    def fits() -> bool:
        room = free_bytes is None or needed_bytes <= free_bytes + sum(model.num_bytes for model in gone)
        return room and len(rest) < max_models

    while not fits():
        if not rest:
            raise NoRoom(
                f"it needs about {needed_bytes} bytes, and {free_bytes} are free without any other model; "
                "allowed: a smaller model, or less --cache-bytes"
            )
        gone.append(rest.pop(0))
    return tuple(model.name for model in gone)
