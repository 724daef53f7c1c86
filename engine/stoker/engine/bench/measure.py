"""Rounds of a workload through an engine in this process. Prompts are ids, answers greedy and as long as asked for."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from stoker.checkpoint.manifest_file import being_read
from stoker.engine.bench import figures
from stoker.engine.bench.fit import check_batch, check_length
from stoker.engine.bench.progress import BenchProgress
from stoker.engine.bench.workload import Workload
from stoker.engine.config import EngineConfig
from stoker.engine.core.fetched_model import with_fetched_model
from stoker.engine.core.messages import RequestFacts
from stoker.engine.llm import LLM, Generated, refuse_copies
from stoker.engine.plan import EnginePlan, plan_engine
from stoker.engine.sampling import SamplingParams
from stoker.model.weights.source import open_weights
from stoker.pod.collection import spare_from_collection


class RequestFailed(RuntimeError):
    """A request of a round was not answered to its end; the message is the engine's reason."""


def measure_throughput(
    config: EngineConfig, workload: Workload, num_rounds: int, progress: BenchProgress
) -> Generator[dict[str, Any], None, None]:
    """Yield what is measured, then the figures of each round: all requests at once.

    Raises:
        RequestFailed: a request could not be answered.
        Exception: as `opened`.
    """
    with opened(config, lambda plan: check_length(workload, plan.max_model_len), progress) as llm:
        yield describe(llm)
        for number in range(1, num_rounds + 1):
            facts, seconds = run_round(llm, workload, number, f"Round {number} of {num_rounds}", progress)
            yield figures.throughput(facts, seconds)


def measure_latency(
    config: EngineConfig, workload: Workload, num_rounds: int, progress: BenchProgress
) -> Generator[dict[str, Any], None, None]:
    """Yield what is measured, then the figures of all rounds behind a first one, in which kernels and graphs are made.

    Raises:
        RequestFailed: a request could not be answered.
        Exception: as `opened`.
    """

    def check(plan: EnginePlan) -> None:
        check_length(workload, plan.max_model_len)
        check_batch(workload, plan.num_seats, plan.num_blocks, plan.block_size)

    with opened(_queueing(config, workload.count), check, progress) as llm:
        yield describe(llm)
        run_round(llm, workload, 0, "Warm-up", progress)
        facts: list[RequestFacts] = []
        for number in range(1, num_rounds + 1):
            facts += run_round(llm, workload, number, f"Round {number} of {num_rounds}", progress)[0]
    yield {"rounds": num_rounds, "batch": workload.count, **figures.latency(facts, num_rounds)}


@contextmanager
def opened(config: EngineConfig, check: Callable[[EnginePlan], None], progress: BenchProgress) -> Iterator[LLM]:
    """Load the model. `check` gets the plan before weights are read, and again with the memory that all ranks have.

    Raises:
        ConfigError: a setting cannot be used, or the workload does not fit.
        ValueError: the weights or the tokenizer cannot be loaded.
        OSError: a model cannot be fetched.
    """
    refuse_copies(config)
    config, _ = with_fetched_model(config, progress.stage)
    path = Path(config.model.path)
    with being_read(path):
        check(plan_engine(config, open_weights(path, config.model.digest)))
        progress.stage(f"Loading {path.name}")
        with LLM(config) as llm, _sparing_collection():
            check(llm.plan)
            yield llm


def run_round(
    llm: LLM, workload: Workload, number: int, title: str, progress: BenchProgress
) -> tuple[list[RequestFacts], float]:
    """Answer every request of a round; return the facts in their order, and the seconds that all took together."""
    vocabulary = min(llm.engine.limits.vocab_size, llm.tokenizer.vocab_size)
    requests = list(workload.requests(number, vocabulary))
    prompts = [prompt for prompt, _ in requests]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests]
    progress.begin_round(title, len(requests))
    began_s = time.perf_counter()
    answers = llm.generate(prompts, params, progress=progress)
    seconds = time.perf_counter() - began_s
    return [_facts(answer) for answer in answers], seconds


def describe(llm: LLM) -> dict[str, Any]:
    """Return what figures depend on: how and where the model was computed."""
    plan = llm.plan
    return {
        "device": plan.device,
        "device_name": torch.cuda.get_device_name() if plan.device == "cuda" else "",
        "threads": plan.threads,
        "tensor": plan.tensor,
        "pipeline": plan.pipeline,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "kernels": plan.kernels,
        "attention": plan.attention,
        "max_batch_tokens": plan.max_batch_tokens,
        "max_requests": plan.num_seats,
        "cache_tokens": plan.num_blocks * plan.block_size,
    }


def _facts(answer: Generated) -> RequestFacts:
    completion = answer.completions[0]
    if completion.finish_reason != "length" or completion.facts is None:
        raise RequestFailed(f"a request failed: {completion.error or completion.finish_reason}")
    return completion.facts


def _queueing(config: EngineConfig, num_requests: int) -> EngineConfig:
    """The configuration with a queue for a whole batch, so that all its requests arrive together."""
    longest = max(config.scheduler.max_queued_requests, num_requests)
    scheduler = config.scheduler.model_copy(update={"max_queued_requests": longest})
    return config.model_copy(update={"scheduler": scheduler})


@contextmanager
def _sparing_collection() -> Iterator[None]:
    """Collect garbage as the core of a server does; afterwards what was left out is collected again."""
    spare_from_collection()
    try:
        yield
    finally:
        gc.unfreeze()
