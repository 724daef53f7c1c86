"""Engines of several ranks on a CPU, and their answers to prompts that use every way of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import transformers

from stoker.engine.config import EngineConfig
from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.build import build_engine
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.scheduler import Scheduler
from stoker.engine.core.step_flight import StepFlight
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.ranks.executor import Ranks
from stoker.engine.sampling import SamplingParams
from testing.engine.tiny_tokenizer import tokenizer_json

Answers = dict[tuple[str, int], list[tuple[int, float]]]
"""(request, choice) -> (token, log-probability)."""
SHARED = list(range(30, 60))
LENGTHS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0}
PROMPTS = {
    "greedy": ([5, 6, 7] * 5, SamplingParams(temperature=0)),
    "seeded": ([100, 3], SamplingParams(temperature=0.9, seed=11, top_p=0.9)),
    "forked": (SHARED, SamplingParams(temperature=1.2, seed=3, n=3, presence_penalty=0.5)),
    "cached": ([*SHARED, 7, 9], SamplingParams(temperature=0.7, seed=-5)),
    "scored": ([9, 8, 7, 6, 5], SamplingParams(temperature=0, prompt_logprobs=1)),
    "allowed": ([4, 4], SamplingParams(seed=1, allowed_token_ids=(7, 70, 170), bad_sequences=((7, 70),))),
    "grammar": ([8, 3, 1], SamplingParams(seed=2, grammar=OutputGrammar.regex("[a-f]{2,40}"))),
}


def saved(twin: transformers.PreTrainedModel, folder: Path) -> Path:
    twin.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    return folder


def config_of(folder: Path, tensor: int, **more: Any) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "device": "cpu",
            "threads": 1,
            "cache": {"num_blocks": 100, "block_size": 4},
            "scheduler": {"max_batch_tokens": 64, "max_requests": 6},
            "parallelism": {"tensor": tensor},
            **more,
        }
    )


def beside(
    engine: LLMEngine, *, overlap: bool = False, budget: int = 16, num_blocks: int = 100, stages: int = 1
) -> LLMEngine:
    """Make another engine on the same executor, whose cache begins empty. `stages`: of which steps are in flight."""
    blocks = BlockManager(num_blocks, 4)
    flight = StepFlight(stages, overlap=overlap)
    scheduler = Scheduler(blocks, max_batch_tokens=budget, max_requests=6, max_queued_requests=100, flight=flight)
    return LLMEngine(engine.executor, scheduler, engine.limits, overlap=overlap, grammars=engine.grammars)


def answers(engine: LLMEngine, names: tuple[str, ...] = tuple(PROMPTS), turn: str = "") -> Answers:
    """The answers to some prompts, computed together. Log-probabilities of a prompt belong to choice -1."""
    for name in names:
        prompt, params = PROMPTS[name]
        engine.add_request(name + turn, prompt, replace(params, **LENGTHS))
    found: Answers = {}
    while engine.has_unfinished:
        for _, delta in engine.step():
            assert delta.error is None, delta.error
            scores = [score.logprob for score in delta.logprobs or ()]
            name = delta.request_id.removesuffix(turn)
            found.setdefault((name, delta.choice), []).extend(zip(delta.tokens, scores, strict=True))
            prompt_scores = [(0, score.logprob) for score in delta.prompt_logprobs or () if score is not None]
            if prompt_scores:
                found[name, -1] = prompt_scores
    return found


def tokens_of(found: Answers) -> dict[tuple[str, int], list[int]]:
    return {key: [token for token, _ in entries] for key, entries in found.items()}


def started(
    folder: Path, tensor: int, experts: Mapping[str, int] = MappingProxyType({}), **parallelism: int
) -> LLMEngine:
    engine, plan = build_engine(
        config_of(
            folder, tensor, deterministic=True, experts=dict(experts), parallelism={"tensor": tensor, **parallelism}
        )
    )
    assert plan.ranks == tensor * parallelism.get("pipeline", 1)
    return engine


def closed(engine: LLMEngine) -> None:
    engine.close()
    assert isinstance(engine.executor, Ranks)
    codes = {process.returncode for process in engine.executor.workers.processes.values()}
    assert codes == {0}, "none was killed"
