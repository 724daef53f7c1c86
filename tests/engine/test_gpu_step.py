"""The same code on a GPU: the same tokens as on the CPU, and no wait for the device that the step does not announce."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.messages import Delta
from stoker.engine.execution.executor import OnDevice
from stoker.engine.sampling import SamplingParams
from tests.engine.conftest import MakeEngine
from tests.engine.test_engine import assert_same, drive, random_prompts, run, tokens_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GREEDY = SamplingParams(temperature=0, max_tokens=20)


ON_DEVICE: dict[str, dict[str, Any]] = {
    "reference": {"device": "cuda"},
    "fused": {"device": "cuda", "kernels": "fused", "overlap": True, "execute": OnDevice},
}
both_kernels = pytest.mark.parametrize("kernels", list(ON_DEVICE))


@both_kernels
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("setting", [{}, {"chunk": 5, "budget": 32, "seats": 16}, {"num_blocks": 45}], ids=str)
def test_greedy_tokens_equal_the_cpu_s(
    architecture: str, setting: dict[str, Any], kernels: str, make_engine: MakeEngine, twins: dict[str, Any]
) -> None:
    prompts = random_prompts(30)
    wanted = run(make_engine(architecture), prompts, GREEDY)
    found = run(make_engine(architecture, **ON_DEVICE[kernels], **setting), prompts, GREEDY)
    for prompt, ours, theirs in zip(prompts, found, wanted, strict=True):
        assert_same(twins[architecture], prompt, ours, theirs)


MIXED = {
    "drawn": SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=3, max_tokens=9, ignore_eos=True),
    "forked": SamplingParams(n=3, seed=4, temperature=1.2, max_tokens=9, ignore_eos=True),
    "penalised": SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=5, max_tokens=9
    ),
    "scored": SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, max_tokens=9, ignore_eos=True),
    "bounded": SamplingParams(temperature=0, min_tokens=5, bad_token_ids=(7, 8), logit_bias={9: 3.0}, max_tokens=9),
}


def add_mixed(engine: LLMEngine) -> None:
    for prompt, (name, params) in zip(random_prompts(len(MIXED), seed=2), MIXED.items(), strict=True):
        engine.add_request(name, prompt, params)


@both_kernels
def test_every_kind_of_sampling_equals_the_cpu_s(kernels: str, make_engine: MakeEngine) -> None:
    answers: list[list[Delta]] = []
    for where in ({}, ON_DEVICE[kernels]):
        engine = make_engine(**where)
        add_mixed(engine)
        answers.append(sorted(drive(engine), key=lambda delta: (delta.request_id, delta.choice)))
    assert tokens_of(answers[1]) == tokens_of(answers[0])
    for cpu, gpu in zip(*answers, strict=True):
        for ours, theirs in zip(gpu.logprobs or (), cpu.logprobs or (), strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


@both_kernels
def test_bfloat16_runs(kernels: str, make_engine: MakeEngine) -> None:
    engine = make_engine(dtype=torch.bfloat16, **ON_DEVICE[kernels])
    add_mixed(engine)
    assert all(delta.error is None for delta in drive(engine))


@both_kernels
def test_a_step_waits_for_the_device_only_for_its_result(kernels: str, make_engine: MakeEngine) -> None:
    """The steps are greedy and drawn decode steps; the model's tests cover the attention's own preparation."""
    engine = make_engine(**ON_DEVICE[kernels])
    add_mixed(engine)
    for _ in range(3):
        engine.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "called a synchronizing" in str(warning.message)]
    places = {f"{warning.filename.rsplit('/', 1)[-1]}:{warning.lineno}" for warning in waits}
    ours = ("runner", "sampler", "staging", "seats", "step_", "pass_inputs")
    looked_at = places if kernels == "fused" else {place for place in places if place.startswith(ours)}
    assert looked_at == set(), places
