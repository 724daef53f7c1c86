"""Data-parallel ranks that share the experts compute the same steps, and answer as one rank does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.engine.core.build import build_engine
from stoker.engine.ranks.pod_share import first_data_rank, share_of_pod
from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.config_file import ConfigError
from testing.engine.data_ranks import PATIENCE_S, Turn, running
from testing.engine.rank_engines import PROMPTS, answers, config_of, saved
from testing.engine.served_engine import served_engine
from testing.free_port import free_port

EVERY = tuple(PROMPTS)
SHARED: dict[str, Any] = {"parallelism": {"data": 2, "expert": 2}}


@pytest.fixture(scope="module")
def folder(twins: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen3-moe of two layers with eight experts."""
    return saved(twins["qwen3-moe"], tmp_path_factory.mktemp("experts"))


def test_ranks_that_share_experts_answer_as_one_rank(folder: Path, tmp_path: Path) -> None:
    """One rank has more to do than the other, which is idle at last; prompts come from the cache, in chunks, with
    preemptions; a request that makes a step fail fails alone, while the other rank computes or rests."""
    engine, _ = build_engine(config_of(folder, 1))
    expected = [((name, choice), entries) for (name, choice), entries in sorted(answers(engine).items())]
    turns: list[list[Turn]] = [
        [("plain", EVERY), ("again", EVERY), ("tight", EVERY), ("poisoned", ())],
        [("plain", ("greedy", "forked")), ("poisoned", ())],
    ]
    with running(config_of(folder, 1, **SHARED), turns, tmp_path) as ranks:
        for _ in range(3):
            assert_equal(ranks.answer(0), expected)
        assert_equal(ranks.answer(1), [one for one in expected if one[0][0] in ("greedy", "forked")])
        assert [ranks.answer(0), ranks.answer(1)] == [None, None], "as without the request that fails"
        assert ranks.end() == [0, 0]


def test_ranks_of_several_pods_name_one_that_dies_within_steps(folder: Path, tmp_path: Path) -> None:
    """They meet over TCP and prove the replica's key."""
    turns: list[list[Turn]] = [[("plain", ("greedy",)), ("long", ())]] * 2
    with running(config_of(folder, 1, **SHARED), turns, tmp_path, port=free_port()) as ranks:
        assert ranks.answer(1) == ranks.answer(0)
        ranks.kill(0)
        assert ranks.answer(1) == "data rank 0 has ended"


def test_the_others_name_a_rank_that_hangs(folder: Path, tmp_path: Path) -> None:
    with running(
        config_of(folder, 1, **SHARED), [[("long", ())], [("plain", ("greedy",))]], tmp_path, (4, PATIENCE_S)
    ) as ranks:
        ranks.answer(1)
        ranks.kill(1, signal.SIGSTOP)
        assert ranks.answer(0).startswith("data rank 1 is silent for ")


def test_a_rank_in_another_step_is_named_and_answers_nothing_wrong(folder: Path, tmp_path: Path) -> None:
    """Its messages have another number than the one that all have agreed on."""
    with running(config_of(folder, 1, **SHARED), [[("plain", ("greedy",))], [("astray", ())]], tmp_path) as ranks:
        assert ranks.answer(1) is None
        assert ranks.answer(0).startswith("data rank 0: PeersParted: data rank 1 is in exchange 0 of step 1 with 0 tok")


def test_an_engine_whose_cores_share_experts_serves_and_ends_with_a_killed_one(folder: Path) -> None:
    with served_engine(folder, "--data-parallel-size", "2", "--expert", "2") as served:
        asked: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        url = f"{served.url}/v1/completions"
        answer = httpx.post(url, json={**asked, "prompt": [[5, 6, 7]] * 4, "n": 1}, timeout=120).json()
        texts = {choice["text"] for choice in answer["choices"]}
        alone = httpx.post(url, json=asked, timeout=120).json()["choices"][0]["text"]
        assert texts == {alone}
        ranks: list[dict[str, Any]] = []
        while min((one["steps"] for one in ranks), default=0) < 24:  # the idle one has taken part
            ranks = httpx.get(f"{served.url}/status", timeout=120).json()["ranks"]
            time.sleep(0.2)
        assert [one["rank"] for one in ranks] == [0, 1]
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        _, errors = served.process.communicate(timeout=300)
        assert "killed by signal 9" in errors or "data rank 1 has ended" in errors


def test_both_pods_of_a_replica_serve_and_share_the_experts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("5a" * 32)
    ports, meeting = [free_port(), free_port()], free_port()
    pods = [start_pod(folder, tmp_path, number, port, meeting) for number, port in enumerate(ports)]
    try:
        asked: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0}
        texts = [answer_of(port, asked) for port in ports]
        assert texts[0] == texts[1]
        pods[1].kill()
        assert pods[0].wait(300) == EXIT_CODES[Cause.RANK_FAILED], "an idle rank notices it, too"
        assert "data rank 1 has ended" in (tmp_path / "message0").read_text()
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()


def start_pod(folder: Path, tmp_path: Path, number: int, port: int, meeting: int) -> subprocess.Popen[bytes]:
    more: dict[str, Any] = {
        "replica": {"pods": 2, "key_file": str(tmp_path / "key")},
        "listen": {"host": "127.0.0.1", "port": port},
        "model": {"path": str(folder), "dtype": "float32", "names": ["tiny"]},
        "termination_log": str(tmp_path / f"message{number}"),
    }
    (tmp_path / f"pod{number}.json").write_text(config_of(folder, 1, **SHARED, **more).model_dump_json())
    place = {"STOKER_NODE_RANK": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting)}
    command = [sys.executable, "-m", "stoker.engine", "--config", str(tmp_path / f"pod{number}.json")]
    return subprocess.Popen(command, env={**os.environ, **place, "OMP_NUM_THREADS": "1"})


def answer_of(port: int, asked: dict[str, Any]) -> str:
    """Wait until the pod serves, and ask it."""
    url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + 400
    while True:
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                break
        except httpx.TransportError:
            pass
        assert time.monotonic() < until_s, "it does not serve"
        time.sleep(0.2)
    answer: str = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()["choices"][0]["text"]
    return answer


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"expert": 4},
            "parallelism.expert must be 1, a divisor of parallelism.tensor 1, or parallelism.data 2, got 4",
        ),
        ({"tensor": 2, "expert": 4, "data": 4}, "parallelism.tensor must be 1 with parallelism.data 4 and paral"),
        ({"pipeline": 2}, "parallelism.pipeline must be 1 with parallelism.data 2 and parallelism.expert 2, got 2"),
        ({"data": 3, "expert": 3}, "parallelism.expert 3 does not divide the model's 8 experts"),
    ],
)
def test_layouts_that_are_not_built_are_refused_by_name(folder: Path, changes: dict[str, int], text: str) -> None:
    config = config_of(folder, 1, parallelism={"data": 2, "expert": 2, **changes})
    with pytest.raises(ConfigError) as refusal:
        build_engine(config)
    assert str(refusal.value).startswith(text)


@pytest.mark.parametrize(
    ("pods", "parallelism", "share", "first"),
    [
        (2, {"data": 4}, (1, 2), [0, 2]),
        (2, {"data": 2, "expert": 2}, (1, 1), [0, 1]),
        (4, {"data": 2, "tensor": 2}, (2, 1), [0, 0, 1, 1]),
    ],
)
def test_each_pod_has_its_share_of_the_data_ranks(
    folder: Path, pods: int, parallelism: dict[str, int], share: tuple[int, int], first: list[int]
) -> None:
    """`share`: pods of a data rank, and data ranks of a pod."""
    replica = {"pods": pods, "key_file": "key"}
    config = share_of_pod(config_of(folder, 1, replica=replica, parallelism=parallelism))
    assert (config.replica.pods, config.parallelism.data) == share
    assert [first_data_rank(config, {"STOKER_NODE_RANK": str(number)}) for number in range(pods)] == first
    wrong = config_of(folder, 1, replica=replica, parallelism={"data": 3})
    with pytest.raises(ConfigError, match=r"parallelism\.data must be a divisor or a multiple of replica\.pods"):
        share_of_pod(wrong)


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert [tuple(key) for key, _ in found] == [key for key, _ in expected]
    for (key, mine), (_, theirs) in zip(found, expected, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in theirs], key
        assert [score for _, score in mine] == pytest.approx([score for _, score in theirs], abs=1e-4), key
