"""Clients of other projects as they are (`testing/clients`), against an engine and through a router.

They run in an environment of their own, `.clients` (`make clients`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from testing.free_port import free_port

PYTHON = Path(__file__).parents[2] / ".clients/bin/python"
SCRIPT = Path(__file__).parents[2] / "testing/clients/official_clients.py"
FOLDER = Path(os.environ.get("STOKER_CACHE", Path.home() / ".cache/stoker")) / "models/smollm2-135m-instruct"
NAMES = ("langchain", "litellm", "llama_index", "instructor", "lm_eval")
LIMIT_S = 600
WITHOUT_NETWORK = {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
}
"""What clients would fetch when they start."""

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.timeout(5 * LIMIT_S),
    pytest.mark.skipif(not PYTHON.exists(), reason="make clients"),
]
Answers = dict[str, list[dict[str, Any]]]


def start(module: str, folder: Path, config: dict[str, Any]) -> subprocess.Popen[bytes]:
    file = folder / f"{module}.json"
    file.write_text(json.dumps({**config, "termination_log": str(folder / f"{module}-end")}))
    with (folder / f"{module}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(file)],
            env={**os.environ, "STOKER_POD_UID": "engine-0", "OMP_NUM_THREADS": "1"},
            stderr=log,
        )


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url} did not answer")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """What each client was answered, by the engine and by the router in front of it."""
    folder = tmp_path_factory.mktemp("served")
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    ports = [int(url.rpartition(":")[2]) for url in urls]
    model = {"path": str(FOLDER), "dtype": "float32"}
    engine = {"model": model, "listen": {"port": ports[0]}, "threads": 1, "cache": {"num_blocks": 120}}
    (folder / "backends.json").write_text(
        json.dumps({"version": 1, "backends": [{"url": urls[0], "pod_uid": "engine-0"}]})
    )
    patient = {"hold_s": LIMIT_S, "connect_timeout_s": LIMIT_S}  # a busy machine is not what is tested
    backends = str(folder / "backends.json")
    router = {"deployment": "d", "listen": {"port": ports[1]}, "backends_file": backends, **patient}
    processes = [start("stoker.engine", folder, engine), start("stoker.router", folder, router)]
    try:
        for url, process in zip(urls, processes, strict=True):
            wait_for(f"{url}/v1/models", process)
        yield {name: ask(name, [f"{url}/v1" for url in urls], folder) for name in NAMES}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ask(name: str, urls: list[str], folder: Path) -> list[dict[str, Any]]:
    environment = {"HOME": str(folder), "PATH": os.environ["PATH"], "LITELLM_LOG": "ERROR", **WITHOUT_NETWORK}
    command = [str(PYTHON), str(SCRIPT), name, FOLDER.name, str(FOLDER), *urls]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("name", NAMES)
def test_the_router_answers_as_the_engine(answers: Answers, name: str) -> None:
    direct, routed = answers[name]
    if name == "lm_eval":  # the second time from the prefix cache: the sums may differ in the last digits
        direct, routed = ({**found, "loglikelihoods": None} for found in (direct, routed))
    assert routed == direct


def test_chat_and_completions_are_the_same_for_every_client(answers: Answers) -> None:
    chain, lite, index = (answers[name][0] for name in ("langchain", "litellm", "llama_index"))
    whole = chain["whole"]
    assert len(whole) > 10
    chats = [chain["streamed"], *chain["batch"], lite["whole"], lite["streamed"], lite["later"], index["whole"]]
    assert {*chats, index["streamed"]} == {whole}
    assert {lite["completion"], index["completion"], index["streamed_completion"]} == {chain["completion"]}
    assert chain["usage"] == chain["streamed_usage"] == lite["usage"]


def test_tools_and_schemas_of_every_client_are_followed(answers: Answers) -> None:
    called = ["measure", ["metres", "place"]]
    assert answers["langchain"][0]["tool"] == answers["litellm"][0]["tool"] == called
    assert answers["langchain"][0]["typed"] == ["metres", "place"]
    assert answers["instructor"][0] == {"tools": ["metres", "place"], "json_schema": ["metres", "place"]}
    assert "max_tokens: Input should be greater than or equal to 1 (got -1)" in answers["litellm"][0]["refused"]


@torch.inference_mode()
def test_an_evaluation_measures_what_transformers_computes(answers: Answers) -> None:
    twin = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    rows = [("The quick brown fox", (" jumps", " 3")), ("Naive cafes", (" serve", "x"))]
    for (text, choices), measured in zip(rows, answers["lm_eval"][0]["loglikelihoods"], strict=True):
        for choice, found in zip(choices, measured, strict=True):
            start_, ids = len(tokenizer(text).input_ids), tokenizer(text + choice).input_ids
            scores = twin(torch.tensor([ids])).logits[0].log_softmax(-1)
            expected = sum(float(scores[place - 1, ids[place]]) for place in range(start_, len(ids)))
            assert found == pytest.approx(expected, abs=2e-3)
