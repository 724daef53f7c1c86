"""`stoker bench throughput | latency`: its prompts, its figures, and the program on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.bench.figures import latency, throughput
from stoker.engine.bench.program import main
from stoker.engine.bench.workload import Workload
from stoker.engine.core.messages import RequestFacts
from stoker.pod.token_lengths import TokenLengths


@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 40), st.integers(0, 30), st.integers(0, 5))
def test_rounds_have_equal_lengths_and_share_only_the_beginning(
    count: int, low: int, more: int, shared: int, seed: int
) -> None:
    workload = Workload(count, TokenLengths(low, low + more), TokenLengths(1, 3), shared, seed)
    first, second = (list(workload.requests(number, 5000)) for number in (0, 1))
    assert first == list(workload.requests(0, 5000))
    assert [(len(prompt), output) for prompt, output in first] == [(len(prompt), output) for prompt, output in second]
    assert len({prompt[:shared] for prompt, _ in first + second}) == 1
    for prompt, output in first:
        assert low <= len(prompt) - shared <= low + more
        assert len(prompt) + output <= workload.longest
        assert all(100 <= token < 5000 for token in prompt)


def facts(arrival_s: float, first_s: float | None, last_s: float, output: int) -> RequestFacts:
    return RequestFacts(10, 4, output, 0, arrival_s, arrival_s, first_s, last_s, last_s)


def test_figures_by_hand() -> None:
    found = [facts(1.0, 1.5, 2.5, 11), facts(1.0, 1.25, 1.25, 1)]
    assert throughput(found, 2.0) == {
        "seconds": 2.0,
        "requests": 2,
        "input_tokens": 20,
        "cached_tokens": 8,
        "output_tokens": 12,
        "preemptions": 0,
        "requests_per_s": 1.0,
        "output_tokens_per_s": 6.0,
        "total_tokens_per_s": 16.0,
    }
    times = latency(found)
    assert (times["ttft_ms"]["min"], times["ttft_ms"]["max"], times["ttft_ms"]["mean"]) == (250.0, 500.0, 375.0)
    assert (times["tpot_ms"]["min"], times["tpot_ms"]["max"]) == (100.0, 100.0), "one token has no time behind it"
    assert times["e2el_ms"]["max"] == 1500.0
    assert latency([])["ttft_ms"] == {}


@pytest.fixture(scope="module")
def folder(twins: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of bytes."""
    found = tmp_path_factory.mktemp("model")
    twins["llama"].save_pretrained(found)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])).save(str(found / "tokenizer.json"))
    return found


SMALL = ["--input-tokens", "6", "--output-tokens", "4", "--max-model-len", "64", "--num-blocks", "60", "--json"]


def test_throughput_tells_every_round(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--requests", "5", "--shared-tokens", "32", "--rounds", "2", *SMALL]
    assert main(["throughput", str(folder), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["rounds"]
    assert [one["output_tokens"] for one in (first, second)] == [20, 20]
    assert found["output_tokens_per_s"] == second["output_tokens_per_s"] > 0
    assert second["cached_tokens"] == 5 * 32, "of the shared beginning and of nothing else"
    assert found["device"] == "cpu"
    assert main(["throughput", str(folder), *words[:-1], "--no-prefix-cache"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in shown[:2]] == ["round 1", "round 2"]
    assert shown[2].startswith("The figure is that of round 2")


def test_latency_counts_the_rounds_behind_the_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latency", str(folder), "--batch", "2", "--rounds", "3", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["rounds"], found["batch"]) == (6, 3, 2)
    for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
        assert 0 < found[name]["min"] <= found[name]["p50"] <= found[name]["max"]
    assert main(["latency", str(folder), "--rounds", "1", *SMALL[:-1]]) == 0
    assert "first token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["throughput", "MODEL", "--input-tokens", "60:70", "--output-tokens", "8"], "70 input + 8 output = 78 tokens"),
        (
            ["latency", "MODEL", "--output-tokens", "60"],
            "128 input + 60 output = 188 tokens; allowed are 64",
        ),
        (["latency", "MODEL", "--data", "2"], "parallelism.data must be 1 for an engine in this process, got 2"),
        (["throughput", "/no/model"], "/no/model does not exist; a folder or a GGUF file is needed"),
        (["throughput", "s3:/x"], "does not exist"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    folder: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(folder) if word == "MODEL" else word for word in words]
    assert main([*given, "--max-model-len", "64", "--num-blocks", "60"]) == 64
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["throughput", "m", "--requests", "0"], "a whole number above 0 is needed (got '0')"),
        (["throughput", "m", "--output-tokens", "9:3"], "1 <= MIN <= MAX is needed (got '9:3')"),
        (["throughput", "m", "--shared-tokens", "-1"], "a whole number is needed (got '-1')"),
        (["latency", "m", "--batch", "x"], "a whole number above 0 is needed (got 'x')"),
        (["latency"], "MODEL"),
        ([], "throughput|latency"),
    ],
)
def test_a_wrong_option_is_a_usage_error(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 64
    assert text in capsys.readouterr().err
