"""SmolLM2-135M-Instruct through the product and through transformers, on the same converted weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stoker.model.attend import PackedAttend
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.model.tokenizer import Tokenizer
from stoker.model.weights.source import open_weights

pytestmark = pytest.mark.real_model

QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea.", "What is 12 + 30?"]
TEXTS = [
    "Hello 12345 wörld's\n\n  def f(x):\n\treturn x**2 日本語 🎉 <|im_end|> don't",
    "a  b   c\r\n123,456.78 We'll see, I'm sure; they'VE gone.",
    " leading and trailing \n",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    path = Path(os.environ.get("STOKER_CACHE") or Path.home() / ".cache/stoker") / "models/smollm2-135m-instruct"
    if not path.exists():
        pytest.fail(f"{path} is missing; `make model` brings it")
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def ours(folder: Path) -> Decoder:
    source = open_weights(folder)
    decoder = Decoder(source.config, Ops())
    source.load_into(decoder)
    return decoder


def test_tokens_and_prompts_are_those_of_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.open(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        assert ours.render_chat(messages, add_generation_prompt=True) == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )


@torch.inference_mode()
def test_logprobs_are_within_5e_4_of_transformers(folder: Path, ours: Decoder, theirs: Any) -> None:
    tokenizer = Tokenizer.open(folder)
    prompts = [torch.tensor(tokenizer.encode_chat([{"role": "user", "content": question}])) for question in QUESTIONS]
    lengths = [len(prompt) for prompt in prompts]
    attend = PackedAttend(ours.ops, "auto", torch.tensor([0, *lengths]).cumsum(0))
    positions = torch.cat([torch.arange(length) for length in lengths])
    logprobs = ours.ops.log_softmax(ours.logits(ours(torch.cat(prompts), positions, attend))).split(lengths)
    for prompt, result in zip(prompts, logprobs, strict=True):
        expected = theirs(prompt[None]).logits[0].log_softmax(-1)
        assert (result - expected).abs().max().item() < 5e-4


@torch.inference_mode()
def test_greedy_answers_equal_those_of_transformers(
    folder: Path, ours: Decoder, theirs: Any, make_server: Callable[..., Any]
) -> None:
    tokenizer = Tokenizer.open(folder)
    server = make_server(ours, num_blocks=48, block_size=16)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    growing = [torch.tensor(prompt) for prompt in prompts]
    tables = [server.table(len(prompt) + 24) for prompt in prompts]
    begins = [0] * len(prompts)
    for _ in range(24):  # prefill together, then decode together
        results = server.step(
            [(tokens, begin, len(tokens), table) for tokens, begin, table in zip(growing, begins, tables, strict=True)]
        )
        begins = [len(tokens) for tokens in growing]
        growing = [torch.cat((tokens, result[-1:].argmax(-1))) for tokens, result in zip(growing, results, strict=True)]
    for prompt, tokens in zip(prompts, growing, strict=True):
        answer = tokens[len(prompt) :].tolist()
        answer = answer[: answer.index(2) + 1] if 2 in answer else answer
        logits = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer
    assert "Paris" in tokenizer.decode(growing[0][len(prompts[0]) :].tolist())


@torch.inference_mode()
def test_deterministic_bits_hold_on_real_weights(folder: Path, ours: Decoder, make_server: Callable[..., Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        source = open_weights(folder)
        decoder = Decoder(source.config, Ops(deterministic=True), dtype=dtype)
        source.load_into(decoder)
        tokens = torch.tensor(Tokenizer.open(folder).encode_chat([{"role": "user", "content": QUESTIONS[1]}]))
        attend = PackedAttend(decoder.ops, "auto", torch.tensor([0, len(tokens)]))
        expected = decoder.ops.log_softmax(decoder.logits(decoder(tokens, torch.arange(len(tokens)), attend)))
        server = make_server(decoder, num_blocks=24, block_size=16)
        table, other = server.table(len(tokens)), server.table(20)
        results, begin = [], 0
        for end in (7, 8, 9, 27, len(tokens)):
            results.append(server.step([(tokens.flip(0), 0, 5, other), (tokens, begin, end, table)])[1])
            begin = end
        assert torch.equal(torch.cat(results), expected)
