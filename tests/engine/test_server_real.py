"""The whole path with a real model: HTTP, front, core process, step; compared with transformers on the same weights."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import pydantic
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from stoker.pod.termination_message import parse_termination_message
from testing.free_port import free_port
from tests.engine.conftest import SHAPE, VOCAB

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "The quick brown fox jumps over the lazy dog. Naïve cafés serve 3 €uro coffee; größer, 漢字 and more."


def write_model(folder: Path) -> None:
    """Write a tiny random llama with a tokenizer of its own and a chat template."""
    folder.mkdir()
    torch.manual_seed(3)
    twin = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    twin.save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 2, "do_sample": True, "temperature": 0.5})
    )


@dataclass
class Served:
    url: str
    twin: transformers.PreTrainedModel
    tokenizer: tokenizers.Tokenizer
    process: subprocess.Popen[bytes]
    folder: Path

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Return the greedy answer of transformers, without the end token."""
        with torch.no_grad():
            complete: Any = self.twin.generate
            out = complete(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=count,
                do_sample=False, pad_token_id=0, eos_token_id=2, temperature=1.0,
            )[0]  # fmt: skip
        return [token for token in out[len(prompt) :].tolist() if token != 2]

    def status(self) -> dict[str, object]:
        return dict(httpx.get(f"{self.url}/status", timeout=120).json())

    def tier(self, name: str) -> dict[str, Any]:
        tier = self.status()[name]
        assert isinstance(tier, dict)
        return tier


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("engine")
    write_model(folder / "tiny")
    port = free_port()
    config = {
        "model": {"path": str(folder / "tiny"), "dtype": "float32"},
        "listen": {"port": port},
        "threads": 1,
        "cache": {
            "num_blocks": 60,
            "block_size": 4,
            "host_memory_bytes": 1 << 20,
            "preemption": "swap",
            "disk": {"path": str(folder / "blocks"), "bytes": 1 << 22},
        },
        "scheduler": {"max_batch_tokens": 64, "max_queued_requests": 40},
        "termination_log": str(folder / "termination-log"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "stoker.engine", "--config", str(folder / "config.json")],
            env={**os.environ, "STOKER_POD_UID": "pod-7", "OMP_NUM_THREADS": "1"},
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    twin = transformers.LlamaForCausalLM.from_pretrained(folder / "tiny").eval()
    try:
        _wait_until_ready(url, process, folder / "log")
        yield Served(
            url, twin, tokenizers.Tokenizer.from_file(str(folder / "tiny" / "tokenizer.json")), process, folder
        )
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def test_greedy_answers_are_those_of_transformers(served: Served) -> None:
    import openai  # a machine with GPUs may lack it

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        prompt = served.tokenizer.encode("The lazy brown €").ids
        expected = served.tokenizer.decode(served.greedy(prompt, 24))
        whole = client.completions.create(model="tiny", prompt="The lazy brown €", max_tokens=24, temperature=0)
        assert whole.choices[0].text == expected
        chunks = list(client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        rendered = served.tokenizer.encode("<|im_start|>user\nfox?<|im_end|>\n<|im_start|>assistant\n").ids
        chat = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "fox?"}], max_tokens=16, temperature=0
        )
        assert chat.choices[0].message.content == served.tokenizer.decode(served.greedy(rendered, 16))
        again = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "fox?"}], max_tokens=16, temperature=0
        )
        assert again.choices[0].message.content == chat.choices[0].message.content
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 0  # the prefix cache is reported


@pytest.mark.parametrize(("width", "length_penalty"), [(3, 1.0), (5, 0.0)])
def test_a_beam_search_finds_what_transformers_finds(served: Served, width: int, length_penalty: float) -> None:
    prompt = served.tokenizer.encode("The lazy brown €").ids
    twin: Any = served.twin
    with torch.no_grad():
        found = twin.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=20, do_sample=False,
            length_penalty=length_penalty, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    body = {"prompt": prompt, "use_beam_search": True, "n": width, "length_penalty": length_penalty, "max_tokens": 20}
    body |= {"ignore_eos": True, "return_token_ids": True}
    choices = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [row[len(prompt) :].tolist() for row in found]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_scored_prompt_has_the_log_probabilities_of_transformers(served: Served, max_tokens: int) -> None:
    prompt = served.tokenizer.encode(TEXT).ids[:70]
    with torch.no_grad():
        logits = served.twin(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(logits[place - 1, prompt[place]]) for place in range(1, len(prompt))]
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    choice = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    scores = choice["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert scores[1 : len(prompt)] == pytest.approx(expected, abs=1e-4)
    assert len(scores) == len(prompt) + max_tokens
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0


def test_many_at_once_answer_as_each_alone(served: Served) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=served.url, timeout=90) as http:
            bodies = [{"prompt": TEXT[i : i + 20], "max_tokens": 12, "seed": i, "temperature": 0.8} for i in range(10)]

            async def ask(body: dict[str, object]) -> str:
                answer = await http.post("/v1/completions", json=body)
                return str(answer.json()["choices"][0]["text"])

            alone = [await ask(body) for body in bodies[:4]]
            together = await asyncio.gather(*(ask(body) for body in bodies))
            assert together[:4] == alone
            good, bad = await asyncio.gather(ask(bodies[0]), http.post("/v1/completions", json={"prompt": [VOCAB]}))
            assert (good, bad.status_code) == (alone[0], 400)

    asyncio.run(scenario())


def test_a_client_that_leaves_frees_its_blocks(served: Served) -> None:
    body = {"prompt": "fox", "max_tokens": 150, "ignore_eos": True, "stream": True, "n": 3}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        status = served.status()
        if (status["running"], status["waiting"], status["free_blocks"]) == (0, 0, 60):
            return
        time.sleep(0.1)
    raise AssertionError(status)


def test_cold_blocks_move_to_the_host_tier_and_come_back_with_the_same_answers(served: Served) -> None:
    prompts = [[3 + (7 * turn + 5 * place) % (VOCAB - 3) for place in range(60)] for turn in range(12)]
    bodies = [{"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0} for prompt in prompts]
    texts = [served.tokenizer.decode(served.greedy(prompt, 8)) for prompt in prompts]
    deadline = time.monotonic() + 300
    while True:
        for body, text in zip(bodies, texts, strict=True):
            answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).json()
            assert answer["choices"][0]["text"] == text
        tier = served.status()["host_tier"]
        assert isinstance(tier, dict)
        if tier["loaded"] > 0:
            break
        assert time.monotonic() < deadline, tier
    assert (tier["total_blocks"], tier["transport"], tier["damaged"]) == (512, "host-memory", 0)
    assert tier["read_bytes_per_s"] > 0
    metrics = httpx.get(f"{served.url}/metrics", timeout=120).text
    figures = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("stoker:host"))
    labels = 'engine="0",event="{}",model_name="tiny"'
    assert float(figures[f"stoker:host_blocks_total{{{labels.format('saved')}}}"]) >= tier["saved"]
    assert float(figures[f"stoker:host_blocks_total{{{labels.format('damaged')}}}"]) == 0
    assert 'direction="read"' in metrics


def test_an_idle_engine_writes_its_blocks_to_the_disk(served: Served) -> None:
    body = {"model": "tiny", "prompt": [9, 8, 7] * 20, "max_tokens": 2, "temperature": 0}
    assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).status_code == 200
    deadline = time.monotonic() + 300
    while (tier := served.tier("disk_tier"))["saved"] < 14:
        assert time.monotonic() < deadline, tier
        time.sleep(0.1)
    assert (tier["state"], tier["damaged"], tier["foreign"], tier["failed"]) == ("ok", 0, 0, 0)
    assert 0 < tier["used_bytes"] <= tier["total_bytes"] <= 1 << 22
    (lane,) = (served.folder / "blocks").iterdir()
    assert len(list(lane.rglob("*.block"))) >= 14
    metrics = httpx.get(f"{served.url}/metrics", timeout=120).text
    figures = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line.startswith("stoker:cold"))
    saved = 'stoker:cold_tier_blocks_total{engine="0",event="saved",model_name="tiny",tier="disk"}'
    assert float(figures[saved]) >= 14
    assert float(figures['stoker:cold_tier_up{engine="0",model_name="tiny",tier="disk"}']) == 1


def test_structured_answers_follow_their_schema_and_a_bad_schema_is_a_400(served: Served) -> None:
    class Pet(pydantic.BaseModel):
        name: Literal["Rex", "Tom"]
        legs: Literal[2, 4]
        tags: list[bool] = pydantic.Field(max_length=2)

    import openai  # a machine with GPUs may lack it

    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
        question: Any = {"model": "tiny", "messages": [{"role": "user", "content": "pet?"}], "max_tokens": 120}
        blank = {str(token): -100 for token in range(3, VOCAB) if not served.tokenizer.decode([token]).strip()}
        parsed = client.chat.completions.parse(**question, response_format=Pet, n=2, seed=3, logit_bias=blank).choices
        assert [type(choice.message.parsed) for choice in parsed] == [Pet, Pet]
        streamed = client.chat.completions.create(
            **question, stream=True, seed=4, extra_body={"structured_outputs": {"regex": "[xy]{3,5}!"}}
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
        assert re.fullmatch("[xy]{3,5}!", text)
        with pytest.raises(openai.BadRequestError, match="Invalid type: pet") as refused:
            client.completions.create(model="tiny", prompt="x", extra_body={"guided_json": {"type": "pet"}})
        assert (refused.value.param, refused.value.code) == ("guided_json", "invalid_value")


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(served: Served) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": [5] * 200}, timeout=30)
    assert answer.status_code == 400
    assert "maximum context length is 160 tokens" in answer.json()["error"]["message"]


def test_sigterm_lets_a_stream_end_and_leaves_a_last_word(served: Served) -> None:
    """This test is the last of its module, because it ends the engine."""
    body = {"prompt": "dog", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert served.process.wait(timeout=300) == 78
    word = parse_termination_message((served.folder / "termination-log").read_text())
    assert word is not None
    assert word.cause == "Interrupted"
