"""Documents through the model's tokenizer: ends, masks, errors with their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.pod.config_file import ConfigError, parse
from stoker.trainer.errors import DataError
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.data.source import Conversation, Text
from stoker.trainer.rank.data.tokens import TokenEncoder, open_encoder

QUESTION = {"role": "user", "content": "What is 1+1?"}
ANSWER = {"role": "assistant", "content": "It is two."}


def config_for(tmp_path: Path, **tokenizer: Any) -> TrainerConfig:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [QUESTION, ANSWER]}))
    return parse(
        TrainerConfig,
        {
            "job": {"name": "job", "uid": "uid", "writer": "0a1b2c3d"},
            "termination_log": str(tmp_path / "termination-log"),
            "work_dir": str(tmp_path),
            "model": {"vocab_size": 512},
            "training": {"total_steps": 1},
            "data": {
                "sources": [{"name": "a", "path": str(tmp_path / "a.jsonl")}],
                "tokenizer": {"vocab_size": 280, **tokenizer},
            },
            "checkpoint": {"root": str(tmp_path / "checkpoints")},
        },
    )


def encoder_for(tmp_path: Path) -> TokenEncoder:
    return open_encoder(config_for(tmp_path), {})


def test_a_text_ends_with_the_end_of_sequence_and_a_piece_does_not(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path)
    whole, piece = encoder.encode([Text("two"), Text("two", ends=False)])
    assert whole.learned is piece.learned is None
    assert [*piece.ids, encoder.end_id] == whole.ids
    assert encoder.tokenizer.decode(whole.ids) == "two"


def test_of_a_conversation_the_answer_and_its_end_are_learned(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path)
    text, conversation = encoder.encode([Text("x"), Conversation((QUESTION, ANSWER, QUESTION, ANSWER))])
    assert text.learned is None
    assert conversation.learned is not None
    learned = [token for token, learns in zip(conversation.ids, conversation.learned, strict=True) if learns]
    assert encoder.tokenizer.decode(learned, skip_special_tokens=False) == "It is two.<|im_end|>" * 2
    whole = encoder.tokenizer.decode(conversation.ids, skip_special_tokens=False)
    assert whole.startswith("<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\nIt is two.<|im_end|>\n")


def test_the_starting_weights_tokenizer_is_taken_first(tmp_path: Path) -> None:
    files = encoder_for(tmp_path).files
    config = config_for(tmp_path, vocab_size=300)
    assert open_encoder(config, files).fingerprint == encoder_for(tmp_path).fingerprint
    assert open_encoder(config_for(tmp_path, kind="train", vocab_size=270), files).vocab_size <= 270


def test_a_tokenizer_can_be_named(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name, content in encoder_for(tmp_path).files.items():
        (own / name).write_bytes(content)
    assert (
        open_encoder(config_for(tmp_path, kind="path", path=str(own)), {}).vocab_size
        == encoder_for(tmp_path).vocab_size
    )


def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer: .*nowhere does not exist"):
        open_encoder(config_for(tmp_path, kind="path", path=str(tmp_path / "nowhere")), {})
    for tokenizer in ({"kind": "path"}, {"kind": "train", "path": "x"}):
        with pytest.raises(ConfigError, match=r"data\.tokenizer: path is needed with kind path only"):
            open_encoder(config_for(tmp_path, **tokenizer), {})


def test_a_conversation_that_the_template_refuses_is_named_with_its_place(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path)
    files = dict(encoder.files)
    facts = json.loads(files["tokenizer_config.json"])
    facts["chat_template"] = "{{ raise_exception('roles must alternate') }}"
    files["tokenizer_config.json"] = json.dumps(facts).encode()
    strict = open_encoder(config_for(tmp_path), files)
    with pytest.raises(DataError, match=r"a\.jsonl:3: .*roles must alternate"):
        strict.encode([Conversation((QUESTION, ANSWER), "a.jsonl:3")])
