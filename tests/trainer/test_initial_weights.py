"""The initial weights of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.trainer.errors import ModelUnusable
from stoker.trainer.rank.initial_weights import InitialWeights
from testing.trainer.tiny_run import TINY, DecoderStore


class TwoTables(DecoderStore):
    """A tied model whose output table is stored as well and differs."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder)
        self._table = super().shapes()["model.embed_tokens.weight"]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().shapes(), "lm_head.weight": self._table}

    def read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return torch.zeros(size) if name == "lm_head.weight" else super().read(name, start, size)


def test_a_tied_model_with_two_different_tables_is_not_trained() -> None:
    decoder = Decoder(replace(TINY, tie_embeddings=True), Ops())
    decoder.init_weights(0)
    with pytest.raises(ModelUnusable, match=r"base: weights: tie_word_embeddings is set, but lm_head.weight differs"):
        InitialWeights(decoder, TwoTables(decoder), lambda _done, _total: None, "base")
