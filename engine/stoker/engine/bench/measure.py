"""Rounds of a workload through an engine in this process. Prompts are ids, answers greedy and as long as asked for."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from stoker.engine.bench import figures
from stoker.engine.bench.workload import Workload
from stoker.engine.core.messages import RequestFacts
from stoker.engine.llm import LLM
from stoker.engine.sampling import SamplingParams
from stoker.pod.config_file import ConfigError


def check_length(llm: LLM, workload: Workload) -> None:
    """Raises ConfigError where a request may be longer than the engine takes."""
    limit = llm.engine.limits.max_model_len
    if workload.longest > limit:
        parts = f"{workload.shared} shared + {workload.own.high} input + {workload.output.high} output"
        raise ConfigError(
            f"the longest request has {parts} = {workload.longest} tokens; allowed are {limit} (--max-model-len)"
        )


def throughput_rounds(llm: LLM, workload: Workload, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of each round: all requests at once."""
    for number in range(rounds):
        began_s = time.monotonic()
        facts = run_round(llm, workload, number)
        yield figures.throughput(facts, time.monotonic() - began_s)


def latency_rounds(llm: LLM, workload: Workload, rounds: int) -> dict[str, Any]:
    """Return the figures of all rounds behind a first one, in which kernels and graphs are still made."""
    run_round(llm, workload, 0)
    facts = [one for number in range(1, rounds + 1) for one in run_round(llm, workload, number)]
    return {"rounds": rounds, "batch": workload.count, **figures.latency(facts)}


def run_round(llm: LLM, workload: Workload, number: int) -> list[RequestFacts]:
    """Answer every request of a round; return the facts in their order."""
    vocabulary = min(llm.engine.limits.vocab_size, llm.tokenizer.vocab_size)
    requests = list(workload.requests(number, vocabulary))
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in requests]
    answers = llm.generate([prompt for prompt, _ in requests], params, progress=sys.stderr.isatty())
    found = [answer.completions[0] for answer in answers]
    if (failed := next((one for one in found if one.facts is None or one.error), None)) is not None:
        raise RuntimeError(f"a request failed: {failed.error or failed.finish_reason}")
    return [one.facts for one in found if one.facts is not None]
