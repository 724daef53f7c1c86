"""Two stages on one GPU, one after the other, and the runs of a layer's experts, also from captured graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.grammars import GrammarCompiler
from stoker.engine.core.request_check import ModelLimits
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.core.step_flight import StepFlight
from stoker.engine.execution.executor import Executor, OnDevice
from stoker.engine.execution.runner import Runner
from stoker.engine.execution.stage_links import StageLinks
from stoker.model.kernels.ops import Ops
from testing.engine.rank_engines import answers, tokens_of
from testing.engine.stages import StagesHere, local_stages
from testing.engine.tiny_tokenizer import tokenizer_json
from tests.engine.conftest import MAX_LEN, VOCAB, decoder_of, runner_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES: dict[str, int] = {"num_blocks": 100, "block_size": 16, "seats": 6, "budget": 64}


def engine_of(executor: Executor, stages: int) -> LLMEngine:
    scheduler = Scheduler(
        BlockManager(SIZES["num_blocks"], SIZES["block_size"]),
        max_batch_tokens=SIZES["budget"],
        max_requests=SIZES["seats"],
        max_queued_requests=100,
        flight=StepFlight(stages, overlap=True),
    )
    grammars = GrammarCompiler(tokenizer_json(), VOCAB, (2,))
    return LLMEngine(executor, scheduler, ModelLimits(VOCAB, MAX_LEN, (2,)), overlap=True, grammars=grammars)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_stages_with_graphs_equal_the_whole_model(name: str, twins: dict[str, Any]) -> None:
    ops, twin = Ops("fused"), twins[name]

    def make_stage(layers: range | None = None, links: StageLinks | None = None) -> Runner:
        return runner_of(decoder_of(twin, ops, device="cuda", layers=layers), links=links, **SIZES)

    with torch.inference_mode():
        expected = tokens_of(answers(engine_of(OnDevice(make_stage()), 1)))
        sizes = {"hidden_size": twin.config.hidden_size, "num_seats": SIZES["seats"]}
        here: StagesHere = local_stages(make_stage, [range(1), range(1, 2)], "cuda", **sizes)
        assert tokens_of(answers(engine_of(here, 2))) == expected
        while here.capture_next_graph():
            pass
        for stage in here.stages:
            assert stage.graphs is not None
            assert {bool(shape.prompts) for shape in stage.graphs.graphs} == {True, False}
        assert tokens_of(answers(engine_of(here, 2))) == expected
