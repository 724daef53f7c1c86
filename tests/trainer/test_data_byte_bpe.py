"""The tokenizer that is trained on the corpus: complete, repeatable, made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from stoker.pod.config_file import ConfigError, parse
from stoker.trainer.errors import DataError
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.data.byte_bpe import train_tokenizer

TEXT = "The stoker feeds the fire, and the fire feeds the ship. " * 30


def config_for(work: Path, source: Path, vocab_size: int = 300) -> TrainerConfig:
    return parse(
        TrainerConfig,
        {
            "job": {"name": "job", "uid": "uid", "writer": "0a1b2c3d"},
            "termination_log": str(work / "termination-log"),
            "work_dir": str(work),
            "model": {"vocab_size": 512},
            "training": {"total_steps": 1},
            "data": {"sources": [{"name": "a", "path": str(source)}], "tokenizer": {"vocab_size": vocab_size}},
            "checkpoint": {"root": str(work / "checkpoints")},
        },
    )


def write(folder: Path, name: str, *documents: Any) -> Path:
    (folder / name).write_text("\n".join(json.dumps(document) for document in documents))
    return folder / name


def test_any_text_comes_back_and_the_corpus_is_short(tmp_path: Path) -> None:
    folder = train_tokenizer(config_for(tmp_path, write(tmp_path, "a.jsonl", {"text": TEXT})))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (TEXT, "naïve 火 🔥\t\r\n", " two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() <= 300
    assert len(tokenizer.encode(TEXT).ids) < len(TEXT) / 3


def test_equal_corpora_give_equal_tokenizers(tmp_path: Path) -> None:
    source = write(tmp_path, "a.jsonl", {"text": TEXT})
    folders = [train_tokenizer(config_for(tmp_path / name, source)) for name in ("one", "two")]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        first, second = ((folder / name).read_bytes() for folder in folders)
        assert first == second
    assert folders[0].name == folders[1].name != train_tokenizer(config_for(tmp_path / "one", source, 290)).name


def test_it_is_learned_once(tmp_path: Path) -> None:
    config = config_for(tmp_path, write(tmp_path, "a.jsonl", {"text": TEXT}))
    reports: list[str] = []
    train_tokenizer(config, reports.append)
    train_tokenizer(config, reports.append)
    assert reports == ["TrainingTokenizer"]


def test_the_same_bytes_in_another_form_give_another_tokenizer(tmp_path: Path) -> None:
    """They share a cache: lines of JSON would be encoded by what was learned from their quotes and field names."""
    content = [{"text": TEXT}, {"text": "fire"}]
    as_text, as_lines = (write(tmp_path, name, *content) for name in ("a.txt", "a.jsonl"))
    folders = [train_tokenizer(config_for(tmp_path, source)) for source in (as_text, as_lines)]
    first, second = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in folders)
    assert first.get_vocab() != second.get_vocab()


def test_a_corpus_that_is_written_meanwhile_teaches_no_tokenizer(tmp_path: Path) -> None:
    source = write(tmp_path, "a.jsonl", {"text": TEXT})

    def write_now(line: str) -> None:
        if line == "TrainingTokenizer":
            write(tmp_path, "a.jsonl", {"text": TEXT}, {"text": "Another text."})

    with pytest.raises(DataError, match=r"data source a: .*a\.jsonl was changed while it was read"):
        train_tokenizer(config_for(tmp_path, source), write_now)
    assert not list((tmp_path / "tokens").glob("bpe-*"))


@pytest.mark.parametrize(
    ("document", "end"),
    [
        ({"text": TEXT}, "<|endoftext|>"),
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": TEXT}]}, "<|im_end|>"),
    ],
    ids=["text", "conversations"],
)
def test_the_end_of_sequence_is_the_end_of_what_is_learned(tmp_path: Path, document: dict[str, Any], end: str) -> None:
    folder = train_tokenizer(config_for(tmp_path, write(tmp_path, "a.jsonl", document)))
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    assert facts["eos_token"] == end
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>").ids == [0, 1, 2]


def test_a_vocabulary_must_hold_all_bytes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.tokenizer.vocab_size: Input should be greater than or equal to 259"):
        config_for(tmp_path, write(tmp_path, "a.jsonl", {"text": TEXT}), 258)


def test_an_empty_corpus_teaches_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="data sources a hold no text to train a tokenizer on"):
        train_tokenizer(config_for(tmp_path, tmp_path / "a.txt"))
