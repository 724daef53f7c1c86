"""The initial weights of a run: random numbers, or a store of weights.

They are filled in parameter by parameter, so that no rank ever holds the whole model in fp32.

Called once by `run_inputs`; changes the decoder's parameters in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from stoker.model.decoder import Decoder
from stoker.model.parameter import Part
from stoker.model.weights.loading import TensorStore, check_fit, load_part
from stoker.trainer.errors import ModelUnusable
from stoker.trainer.rank.pipeline.slices import Model, all_parts

Progress = Callable[[int, int], None]
"""Called with the number of elements filled so far, and in all."""


class InitialWeights:
    """Fills the parameters of the model that a rank holds.

    The values do not depend on the number of ranks: each rank fills the whole bucket and keeps its shard.
    """

    def __init__(
        self,
        model: Model,
        fill_from: TensorStore | int | None,
        progress: Progress,
        origin: str = "",
        adapter_seed: int = 0,
    ) -> None:
        """`fill_from`: a store of weights, the seed of random ones, or None if a checkpoint will overwrite them.

        `origin`: the name of the store in errors. `adapter_seed`: of the adapters, which no store has.

        Raises:
            ModelUnusable: the store's weights are not those of the model.
        """
        self._model = model
        self._from = fill_from
        self._progress = progress
        self._origin = origin
        self._adapter_seed = adapter_seed
        self._parts = all_parts(model)
        self._total = sum(part.num_elements for part in self._parts)
        self._done = 0
        if fill_from is not None and not isinstance(fill_from, int):
            with self._explained():
                check_fit(whole_of(model), fill_from)

    def fill(self, parameters: Sequence[nn.Parameter]) -> None:
        """Fill these parameters.

        Raises:
            ModelUnusable: the store is damaged.
        """
        if self._from is None:
            return
        wanted = {id(parameter) for parameter in parameters}
        for part in self._parts:
            if id(part.parameter) in wanted:
                self._fill_part(part, self._from)
                self._done += part.num_elements
                self._progress(self._done, self._total)

    def _fill_part(self, part: Part, fill_from: TensorStore | int) -> None:
        if part.is_adapter:
            self._model.init_part(part, self._adapter_seed)
        elif isinstance(fill_from, int):
            self._model.init_part(part, fill_from)
        else:
            with self._explained():
                load_part(part, fill_from)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            raise ModelUnusable(f"{self._origin}: {error}") from error


def whole_of(model: Model) -> Decoder:
    """Return the model itself, or for slices the whole one without values: a store must fit all of it."""
    return model if isinstance(model, Decoder) else Decoder(model.config, model.ops, device="meta")
