"""The same engine on a GPU with the reference kernels.

Its tokens are those of the CPU, and in deterministic mode every answer is bitwise the same.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
import transformers

from stoker.engine.config import EngineConfig
from stoker.engine.llm import LLM
from stoker.engine.sampling import SamplingParams
from stoker.pod.config_file import parse
from tests.engine.test_engine import assert_same, random_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def llm(folder: Path, device: str, *, deterministic: bool = False, chunk: int | None = None) -> LLM:
    scheduler = {"max_batch_tokens": 256, "max_requests": 64, "chunk_tokens": chunk}
    return LLM(
        parse(
            EngineConfig,
            {
                "model": {"path": str(folder), "dtype": "float32"},
                "device": device,
                "deterministic": deterministic,
                "cache": {"num_blocks": 1200, "block_size": 4},
                "scheduler": scheduler,
            },
        )
    )


@pytest.fixture(params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, twins: dict[str, transformers.PreTrainedModel]) -> Path:
    from tokenizers import Tokenizer, models

    twins[request.param].save_pretrained(tmp_path)
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(320)}, unk_token="t0")).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_greedy_tokens_on_the_gpu_are_those_of_transformers(
    folder: Path, twins: dict[str, transformers.PreTrainedModel]
) -> None:
    prompts = random_prompts(30)
    with llm(folder, "cpu") as slow, llm(folder, "cuda") as fast:
        theirs = slow.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
        ours = fast.generate(prompts, SamplingParams(temperature=0, max_tokens=20))
    twin = next(t for t in twins.values() if t.config.model_type in (folder / "config.json").read_text())
    for prompt, mine, other in zip(prompts, ours, theirs, strict=True):
        assert_same(twin, prompt, mine.completions[0].tokens, other.completions[0].tokens)


def test_deterministic_log_probabilities_do_not_depend_on_chunks_or_neighbours(folder: Path) -> None:
    prompts = random_prompts(12)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
    seen: dict[int, set[tuple[float, ...]]] = defaultdict(set)
    for chunk in (None, 7):
        with llm(folder, "cuda", deterministic=True, chunk=chunk) as engine:
            together = engine.generate(prompts, params)
            alone = [engine.generate([prompt], params)[0] for prompt in prompts[:4]]
        for index, answer in [*enumerate(together), *enumerate(alone)]:
            assert answer.completions[0].logprobs is not None
            seen[index].add(tuple(item.logprob for item in answer.completions[0].logprobs))
    assert {len(values) for values in seen.values()} == {1}
