from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.model.tokenizer import Tokenizer, TokenizerError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = CHATML.replace("m.content }}", "m.content if loop.last or m.role != 'assistant' else '' }}")
MARKED = "{{ bos_token }}" + CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello, wörld!"},
    {"role": "user", "content": "More"},
    {"role": "assistant", "content": "No."},
]


def make_files(template: str | None = CHATML, **config: Any) -> dict[str, bytes]:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["hello world, more of the same words and wörlds"] * 5, trainer)
    settings = {
        "bos_token": "<|endoftext|>",
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": template,
    } | config
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(make_files())


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30))
def test_pieces_of_a_stream_join_to_the_text(text: str, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(text)
    stream = tokenizer.detokenizer()
    pieces = [stream.add(token) for token in tokens]
    assert "".join(pieces) + stream.finish() == text == tokenizer.decode(tokens)
    assert b"".join(tokenizer.token_bytes(token) for token in tokens).decode() == text


def test_no_piece_ends_within_a_character(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    pieces = [stream.add(token) for token in tokenizer.encode("日🎉")]
    assert [piece for piece in pieces if piece] == ["日", "🎉"]
    assert "\ufffd" not in "".join(pieces)


def test_a_text_that_stays_broken_comes_out_at_the_end_or_after_some_tokens(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("日")[0]
    stream = tokenizer.detokenizer()
    assert (stream.add(half), stream.finish()) == ("", "\ufffd")
    stream = tokenizer.detokenizer()
    assert any(stream.add(half) for _ in range(10))


def test_special_tokens_are_shown_only_when_asked_for(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a<|im_end|>b")
    assert tokenizer.token_id("<|im_end|>") in tokens
    for skip, text in ((True, "ab"), (False, "a<|im_end|>b")):
        stream = tokenizer.detokenizer(skip_special_tokens=skip)
        assert "".join(map(stream.add, tokens)) == text == tokenizer.decode(tokens, skip_special_tokens=skip)


def test_skipped_special_tokens_are_not_kept(tokenizer: Tokenizer) -> None:
    """Kept tokens would be decoded again with every later token."""
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    first, last = tokenizer.encode("日")[:1], tokenizer.encode("日")[1:]
    stream = tokenizer.detokenizer()
    assert "".join(map(stream.add, [*first, *[end] * 50, *last])) == "日"
    assert len(stream.context) + len(stream.pending) <= len(first) + len(last)


def test_ids_of_special_tokens_come_from_all_files() -> None:
    files = make_files() | {"generation_config.json": b'{"eos_token_id": [0, 2]}'}
    tokenizer = Tokenizer(files)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, (0, 2), None)
    assert Tokenizer(make_files()).eos_ids == (2,)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_bytes(10**6) == b""


def test_many_texts_become_what_each_becomes(tokenizer: Tokenizer) -> None:
    texts = ["hello", "", "wörld"]
    assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "with generation tags"])
def test_the_mask_covers_exactly_what_the_assistant_says(template: str) -> None:
    tokenizer = Tokenizer(make_files(template))
    result = tokenizer.encode_conversation(TALK)
    assert result.ids == tokenizer.encode(tokenizer.render_chat(TALK), add_special_tokens=False)
    spoken = [token for token, learned in zip(result.ids, result.mask, strict=True) if learned]
    assert tokenizer.decode(spoken, skip_special_tokens=False) == "Hello, wörld!<|im_end|>No.<|im_end|>"


def test_the_prompts_tokens_are_the_beginning_of_the_conversations(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode_conversation(TALK)
    prompt = tokenizer.encode_chat(TALK[:4])
    assert whole.ids[: len(prompt)] == prompt
    assert whole.mask[len(prompt)]


def test_a_template_that_rewrites_earlier_answers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"writes messages\[2\] differently once others follow"):
        Tokenizer(make_files(FORGETFUL)).encode_conversation(TALK)
    single = Tokenizer(make_files(FORGETFUL)).encode_conversation(TALK[:3])
    assert sum(single.mask) > 0


def test_a_conversation_without_an_answer_has_nothing_to_learn(tokenizer: Tokenizer) -> None:
    assert not any(tokenizer.encode_conversation(TALK[:2]).mask)


def test_the_template_file_wins_and_default_is_chosen_of_several() -> None:
    assert Tokenizer(make_files() | {"chat_template.jinja": b"file"}).render_chat([]) == "file"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert Tokenizer(make_files(several)).render_chat([]) == "plain"  # type: ignore[arg-type]
    assert not Tokenizer(make_files(None)).has_chat_template
    with pytest.raises(TokenizerError, match="there is no chat template"):
        Tokenizer(make_files(None)).render_chat([])


def test_the_fingerprint_follows_the_words_and_the_template() -> None:
    first, second, third = (
        Tokenizer(files).fingerprint for files in (make_files(), make_files(), make_files(FORGETFUL))
    )
    assert first == second != third


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "tokenizer.json is missing"),
        ({"tokenizer.json": b"{}"}, "tokenizer.json is not valid"),
        (make_files() | {"tokenizer_config.json": b"{"}, "tokenizer_config.json is not valid JSON"),
        (make_files() | {"generation_config.json": b"[]"}, "generation_config.json must hold an object"),
    ],
)
def test_damaged_files_are_named(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer(files)


def test_a_folder_opens_and_a_missing_one_is_named(tmp_path: Path) -> None:
    for name, data in make_files().items():
        (tmp_path / name).write_bytes(data)
    assert Tokenizer.open(tmp_path).encode("hello") == Tokenizer(make_files()).encode("hello")
    with pytest.raises(TokenizerError, match="does not exist"):
        Tokenizer.open(tmp_path / "none")


def test_a_tokenizer_needs_no_torch() -> None:
    code = (
        "import sys, stoker.model.tokenizer, stoker.model.weights.gguf_tokenizer, stoker.model.config; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(contents=st.lists(st.text(alphabet="abc é日\n", max_size=12), min_size=2, max_size=4))
def test_masks_fit_any_contents(contents: list[str], tokenizer: Tokenizer) -> None:
    talk = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    result = tokenizer.encode_conversation(talk)
    spoken = tokenizer.decode(
        [t for t, learned in zip(result.ids, result.mask, strict=True) if learned], skip_special_tokens=False
    )
    assert spoken == "".join(text + "<|im_end|>" for text in contents[1::2])
