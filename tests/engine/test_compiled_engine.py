"""An engine with C kernels beside the same engine with the reference kernels, in bfloat16 on the CPU.

The contract: both round in the same places, and sums have another order. So as long as both have chosen the same tokens
their log-probabilities are neighbours, and where they first choose different ones, the two were about as probable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.engine.config import CacheConfig, EngineConfig, SchedulerConfig, ServedModelConfig
from stoker.engine.llm import LLM, Generated
from stoker.engine.sampling import SamplingParams
from stoker.model.kernels.compiled.library import CompileError, load_library
from testing.engine.tiny_tokenizer import tokenizer_json

CLOSE = 0.1
"""Difference of two log-probabilities of the same token."""
PROMPTS = [list(range(3, 3 + length)) for length in (1, 4, 9, 30)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


def answers_of(folder: Path, kernels: Any, prompts: list[list[int]]) -> list[Generated]:
    config = EngineConfig(
        model=ServedModelConfig(path=str(folder), dtype="bfloat16"),
        kernels=kernels,
        threads=1,
        cache=CacheConfig(num_blocks=60),
        scheduler=SchedulerConfig(max_batch_tokens=64, max_requests=4),
    )
    with LLM(config) as llm:
        return llm.generate(prompts, PARAMS, progress=False)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_engine_with_c_kernels_chooses_what_the_reference_would(
    family: str, twins: dict[str, Any], tmp_path: Path
) -> None:
    try:
        load_library()
    except CompileError as error:
        pytest.skip(str(error))
    twins[family].save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    compiled, reference = (answers_of(tmp_path, kernels, PROMPTS) for kernels in ("auto", "reference"))
    for ours, theirs in zip(compiled, reference, strict=True):
        (our,), (their,) = ours.completions, theirs.completions
        assert our.logprobs is not None
        assert their.logprobs is not None
        for our_token, their_token, our_entry, their_entry in zip(
            our.tokens, their.tokens, our.logprobs, their.logprobs, strict=True
        ):
            assert our_entry.logprob == pytest.approx(their_entry.logprob, abs=CLOSE)
            if our_token != their_token:
                break
