"""`stoker bench throughput | latency`: its prompts, its figures, and the program on a tiny model."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.bench import program
from stoker.engine.bench.figures import latency, spread, throughput
from stoker.engine.bench.fit import check_batch
from stoker.engine.bench.measure import RequestFailed
from stoker.engine.bench.program import main
from stoker.engine.bench.progress import BenchProgress
from stoker.engine.bench.report import latency_end, throughput_end
from stoker.engine.bench.workload import Workload
from stoker.engine.core.messages import RequestFacts
from stoker.pod.config_file import ConfigError
from stoker.pod.standard_streams import OutputLost
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
    times = latency(found, 1)
    assert (times["ttft_ms"]["min"], times["ttft_ms"]["max"], times["ttft_ms"]["mean"]) == (250.0, 500.0, 375.0)
    assert (times["tpot_ms"]["min"], times["tpot_ms"]["max"]) == (100.0, 100.0), "one token has no time behind it"
    assert times["e2el_ms"]["max"] == 1500.0
    assert latency([], 1)["ttft_ms"] == {}


@pytest.mark.parametrize(
    ("num_rounds", "percentiles"),
    [
        pytest.param(1, {"p50": 51}, id="one"),
        pytest.param(9, {"p50": 51}, id="few"),
        pytest.param(10, {"p50": 51, "p90": 91}, id="ten"),
        pytest.param(99, {"p50": 51, "p90": 91}, id="almost enough"),
        pytest.param(100, {"p50": 51, "p90": 91, "p99": 100}, id="enough"),
    ],
)
def test_percentiles_need_rounds_however_many_requests_each_has(num_rounds: int, percentiles: dict[str, float]) -> None:
    assert spread(range(1, 101), num_rounds) == {"min": 1, "mean": 50.5, **percentiles, "max": 100}


@given(st.lists(st.integers(0, 10**6), min_size=1))
def test_percentiles_are_measured_values_in_order(values: list[int]) -> None:
    found = spread(values, 100)
    ordered = [found[name] for name in ("min", "p50", "p90", "p99", "max")]
    assert ordered == sorted(ordered)
    assert set(ordered) <= set(values)
    assert spread([], 100) == {}


@pytest.mark.parametrize(
    ("batch", "num_blocks", "message"),
    [
        (4, 8, None),
        (
            *(5, 100),
            "--batch 5 is more than the 4 sequences of one step; --max-requests allows more, up to --max-batch-tokens",
        ),
        (4, 7, "--batch 4 of 33 tokens each needs 8 blocks of the cache, which has 7 (of 16 tokens)"),
    ],
)
def test_a_batch_that_cannot_run_together_is_refused(batch: int, num_blocks: int, message: str | None) -> None:
    workload = Workload(batch, TokenLengths(17, 17), TokenLengths(16, 16))  # the last token needs no room
    assert refusal(lambda: check_batch(workload, 4, num_blocks, 16)) == message


def refusal(check: Any) -> str | None:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO) -> str:
    now_s = iter(range(0, 1000, 6))
    progress = BenchProgress(stream, lambda: next(now_s))
    for percent in (1, 2):
        progress.stage(f"FetchingModel {percent} %")
    progress.begin_round("Round 1 of 2", 9)
    for num_done in (1, 2, 3):
        progress(num_done, 1000 * num_done)
    progress.clear()
    return stream.getvalue()


def test_a_log_gets_lines_now_and_then_and_a_terminal_one_that_changes() -> None:
    assert shown(io.StringIO()).splitlines() == [
        "FetchingModel 1 %",
        "Round 1 of 2",
        "Round 1 of 2: 2 of 9 requests, 2,000 output tokens",
    ]
    assert shown(Terminal()).split("\r\x1b[K") == [
        "",
        "FetchingModel 1 %",
        "FetchingModel 2 %",
        "Round 1 of 2",
        *(f"Round 1 of 2: {number} of 9 requests, {number},000 output tokens" for number in (1, 2, 3)),
        "",
    ]


def test_the_end_of_a_throughput_bench_names_its_figure() -> None:
    figure = {"input_tokens": 1234, "cached_tokens": 64, "output_tokens": 20, "preemptions": 0}
    assert list(throughput_end(figure, 2)) == [
        "The figure is that of round 2: kernels and graphs are made in the first.",
        "It had 1,234 input tokens, 64 of them cached, and 20 output tokens.",
    ]
    assert list(throughput_end({**figure, "cached_tokens": 0, "preemptions": 3}, 1)) == [
        "The figure is that of a first round, in which kernels and graphs are made.",
        "It had 1,234 input tokens, and 20 output tokens.",
        "3 preemptions: the cache was too small for the requests of one step.",
    ]


def test_the_table_of_latency_leaves_out_what_its_rounds_cannot_tell() -> None:
    found = latency([facts(1.0, 1.5, 1.5, 1)] * 20, 10)
    lines = list(latency_end({**found, "rounds": 10, "batch": 2}))
    assert [line.split() for line in lines[1:3]] == [
        ["mean", "min", "p50", "p90", "max", "ms"],
        ["first", "token", *["500.00"] * 5],
    ]
    assert lines[0] == "20 requests in 10 rounds of 2, after one that does not count"
    assert lines[-1] == "Too few rounds for further percentiles: p99 needs 100."
    assert not any("per output token" in line for line in lines), "there is one token"


CPU = ["--device", "cpu", "--dtype", "float32"]
SMALL = ["--input-tokens", "6", "--output-tokens", "4", "--max-model-len", "64", "--num-blocks", "60", *CPU, "--json"]


def test_throughput_tells_every_round(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--requests", "5", "--shared-tokens", "32", "--rounds", "2", *SMALL]
    assert main(["throughput", str(model_folder), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["rounds"]
    assert [one["output_tokens"] for one in (first, second)] == [20, 20]
    assert found["output_tokens_per_s"] == second["output_tokens_per_s"] > 0
    assert second["cached_tokens"] == 5 * 32, "of the shared beginning and of nothing else"
    assert found["device"] == "cpu"
    assert main(["throughput", str(model_folder), *words[:-1], "--no-prefix-cache"]) == 0
    out, err = capsys.readouterr()
    shown = out.splitlines()
    assert shown[0].startswith(f"{model_folder} in float32 on the CPU (")
    assert [line.partition(":")[0] for line in shown[1:3]] == ["round 1", "round 2"]
    assert shown[3].startswith("The figure is that of round 2")
    assert err.splitlines() == [f"Loading {model_folder.name}", "Round 1 of 2", "Round 2 of 2"]


class LostOutput(io.StringIO):
    """A standard output that takes nothing."""

    def flush(self) -> None:
        raise OutputLost(OSError(errno.ENOSPC, "No space left on device"))


def test_an_output_that_takes_no_figures_is_no_fault_of_the_model(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (SMALL, SMALL[:-1]):  # JSON at the end, and lines as they come
        with redirect_stdout(LostOutput()), pytest.raises(OutputLost):
            main(["throughput", str(model_folder), "--rounds", "1", "--requests", "1", *words])
        assert "stoker bench" not in capsys.readouterr().err


def test_latency_counts_the_rounds_behind_the_first(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latency", str(model_folder), "--batch", "2", "--rounds", "3", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["rounds"], found["batch"]) == (6, 3, 2)
    for name in ("ttft_ms", "tpot_ms", "e2el_ms"):
        assert 0 < found[name]["min"] <= found[name]["p50"] <= found[name]["max"]
    assert main(["latency", str(model_folder), "--rounds", "1", *SMALL[:-1]]) == 0
    assert "first token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["throughput", "MODEL", "--input-tokens", "60:70", "--output-tokens", "8"], "70 input + 8 output = 78 tokens"),
        (
            ["latency", "MODEL", "--output-tokens", "60"],
            "128 input + 60 output = 188 tokens; allowed are 64",
        ),
        (["latency", "MODEL", "--batch", "300", "--input-tokens", "3", "--output-tokens", "3"], "more than the 256"),
        (["latency", "MODEL", "--threads", "0"], "threads: Input should be greater than or equal to 1 (got 0)"),
        (["latency", "MODEL", "--data", "2"], "parallelism.data must be 1 for an engine in this process, got 2"),
        (["throughput", "/no/model"], "/no/model does not exist; a folder or a GGUF file is needed"),
        (["throughput", "s3:/x"], "does not exist"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model_folder: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(model_folder) if word == "MODEL" else word for word in words]
    assert main([*given, "--max-model-len", "64", "--num-blocks", "60", *CPU]) == 64
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1), "nothing was loaded"
    assert text in err


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


@pytest.mark.parametrize("verb", ["throughput", "latency"])
def test_help_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: stoker bench {verb} " in out
    assert f"\nstoker bench {verb} ~/models/" in out
    assert "--max-batch-tokens TOKENS" in out


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 69, "stoker bench latency: MemoryError\n"),
        (ValueError("weights: wrong shape"), 66, "stoker bench latency: weights: wrong shape\n"),
        (RequestFailed("logits are not finite"), 77, "RequestFailed: logits are not finite\n"),
    ],
)
def test_an_early_end_has_the_exit_code_of_its_cause(
    error: BaseException,
    code: int,
    said: str,
    model_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> Iterator[None]:
        raise error

    monkeypatch.setattr(program, "_latency", fail)
    assert main(["latency", str(model_folder)]) == code
    assert said in capsys.readouterr().err
