"""SmolLM2 itself: the engine's tokens are those of transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stoker.engine.config import CacheConfig, EngineConfig, SchedulerConfig, ServedModelConfig
from stoker.engine.llm import LLM
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.sampling import SamplingParams

pytestmark = pytest.mark.real_model
FOLDER = Path(os.environ.get("STOKER_CACHE", Path.home() / ".cache/stoker")) / "models/smollm2-135m-instruct"
QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many legs has a spider?",
    "Name three colours.",
    "Why is the sky blue? Answer in two sentences.",
    "Translate 'good morning' into Spanish.",
]
OUTPUT = 32


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = EngineConfig(
        model=ServedModelConfig(path=str(FOLDER), dtype="float32"),
        cache=CacheConfig(num_blocks=120),
        scheduler=SchedulerConfig(max_batch_tokens=64, max_requests=8),
    )
    with LLM(config) as llm:
        yield llm


@pytest.fixture(scope="module")
def twin() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def prompts_of(llm: LLM) -> list[list[int]]:
    return [llm.tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@torch.inference_mode()
def test_greedy_answers_equal_transformers(llm: LLM, twin: Any) -> None:
    prompts = prompts_of(llm)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, logprobs=0)
    answers = llm.generate(prompts, params, progress=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        completion = answer.completions[0]
        ended = [twin.config.eos_token_id] if completion.finish_reason == "stop" else []
        chosen = [*completion.tokens, *ended]
        assert len(chosen) == OUTPUT or ended
        logits = twin(torch.tensor([prompt + chosen])).logits[0, len(prompt) - 1 : -1]
        gaps = logits.max(-1).values - logits.gather(1, torch.tensor(chosen)[:, None]).squeeze(1)
        assert gaps.max() < 1e-4, f"token {int(gaps.argmax())} of {completion.text!r} is not the best"
        truth = torch.log_softmax(logits, -1).gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1)
        assert completion.logprobs is not None
        assert [entry.logprob for entry in completion.logprobs] == pytest.approx(truth.tolist(), abs=5e-4)
    assert "Paris" in answers[0].completions[0].text


def test_answers_under_a_schema_are_json_that_fits(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"colours": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4}},
        "required": ["colours"],
        "additionalProperties": False,
    }
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "Name three colours as JSON."}])
    params = SamplingParams(temperature=0.7, seed=5, n=3, max_tokens=120, grammar=OutputGrammar.json_schema(schema))
    for completion in llm.generate([prompt], params, progress=False)[0].completions:
        assert completion.finish_reason == "stop"
        answer = json.loads(completion.text)
        assert all(0 <= len(colour) <= 12 for colour in answer["colours"])
