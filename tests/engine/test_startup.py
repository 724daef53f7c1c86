"""The engine before its first request: kernel warm-up on one layer, weights beside it, times of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.engine.core.compiler_digest import digest_compiler_beside
from stoker.engine.core.kernel_warmup import kernel_warmup
from stoker.engine.core.startup import Startup, process_age_s
from stoker.engine.plan import EnginePlan
from stoker.model.config import ModelConfig
from stoker.model.kernels.ops import Ops


def warm_up(twin: Any, attention: str = "auto") -> Any:
    config = ModelConfig.from_hugging_face(twin.config.to_dict())
    plan = EnginePlan("", None, "cpu", torch.float32, "reference", attention, False, 1, 16, 100, 160, 256, 16, 1)
    return kernel_warmup(plan, config, Ops(), torch.device("cpu"))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_the_first_steps_are_played_beside_the_reading_of_weights(architecture: str, twins: dict[str, Any]) -> None:
    read = []
    with warm_up(twins[architecture]):
        read.append("weights")
    assert read == ["weights"]


def test_what_goes_wrong_in_the_kernel_warmup_ends_the_start(twins: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'flash' is not built"), warm_up(twins["llama"], "flash"):
        pass


def test_the_digest_of_the_compiler_is_there_before_a_kernel_asks_for_it() -> None:
    assert digest_compiler_beside("cpu") is None
    triton_key = pytest.importorskip("triton.runtime.cache").triton_key
    thread = digest_compiler_beside("cuda")
    assert thread is not None
    thread.join()
    before = triton_key.cache_info()
    assert triton_key()
    after = triton_key.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


def test_parts_of_the_start_follow_one_another() -> None:
    now_s = 0.0
    startup = Startup(lambda: now_s, 1.5)
    for part, seconds in (("Planning", 0.25), ("LoadingWeights", 2.0), ("LoadingWeights", 1.0), ("Warming", 0.5)):
        startup.enter(part)
        now_s += seconds
    startup.enter("")
    assert startup.seconds == {"Importing": 1.5, "Planning": 0.25, "LoadingWeights": 3.0, "Warming": 0.5}
    assert list(startup.seconds) == ["Importing", "Planning", "LoadingWeights", "Warming"]


def test_a_process_knows_its_age() -> None:
    age_s = process_age_s()
    assert (age_s is None) == (not Path("/proc/self/stat").exists())
    assert age_s is None or 0 <= age_s < 24 * 3600
