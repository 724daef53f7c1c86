"""Bounded time and memory for weights and tokenizers, which are foreign input, whatever counts they declare."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from stoker.model.tokenizer import Tokenizer, TokenizerError
from stoker.model.tokenizer_limits import TokenizerLimitError, growth, refuse_exponential
from stoker.model.travelling_files import FileTooLarge, read_travelling_files
from stoker.model.weights.gguf_file import GgufError, GgufFile
from stoker.model.weights.hugging_face import HuggingFaceWeights, weight_files
from stoker.model.weights.loading import WeightsError


def gguf_head(num_tensors: int = 0, num_keys: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, length: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, length) + items


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape) if num_dims is None else num_dims, *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


ARCHITECTURE = key("general.architecture", 8, text("llama"))
GGUF: dict[str, tuple[bytes, str]] = {
    "2^40 tensors": (gguf_head(2**40), "1099511627776 tensors; at most"),
    "2^40 keys": (gguf_head(0, 2**40), "1099511627776 keys; at most"),
    "10^8 strings": (gguf_head(0, 1, key("a", 9, array(8, 10**8))), "100000000 array elements; at most"),
    "2^62 numbers": (gguf_head(0, 1, key("a", 9, array(4, 2**62))), "array elements; at most"),
    "many arrays": (
        gguf_head(0, 9, b"".join(key(f"k{i}", 9, array(0, 400_000, bytes(400_000))) for i in range(9))),
        "2400000 array elements; at most",
    ),
    "nested arrays": (gguf_head(0, 1, key("a", 9, array(9, 1) * 90_000)), "not supported yet: arrays of arrays"),
    "a long text": (gguf_head(0, 1, key("a", 8, struct.pack("<Q", 2**62))), "the head ends at"),
    "a long name": (gguf_head(0, 1, struct.pack("<Q", 2**63)), "the head ends at"),
    "an unknown kind": (gguf_head(0, 1, key("a", 77, b"")), "unknown value type 77"),
    "no text": (gguf_head(0, 1, key("a", 8, struct.pack("<Q", 2) + b"\xff\xff")), "utf-8"),
    "the same key twice": (gguf_head(0, 2, ARCHITECTURE * 2), "'general.architecture' appears twice"),
    "the same tensor twice": (gguf_head(2, 0, tensor("a", (1,)) * 2), "'a' appears twice"),
    "another version": (gguf_head(version=77), "version 77; allowed: 2, 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "allowed: 2, 3, little-endian"),
    "too many dims": (gguf_head(1, 0, tensor("a", (1,), num_dims=2**31)), "2147483648 dims; at most 4"),
    "a huge tensor": (gguf_head(1, 0, tensor("a", (2**40, 2**40))), "ends behind the end of the file"),
    "a tensor behind the end": (gguf_head(1, 0, tensor("a", (4,), offset=2**63)), "ends behind the end"),
    "an unknown tensor type": (gguf_head(1, 0, tensor("a", (1,), kind=999)), "unknown type 999"),
    "half a block": (gguf_head(1, 0, tensor("a", (1,), kind=2)), "do not fill blocks of 32"),
    "alignment 0": (gguf_head(0, 1, key("general.alignment", 4, bytes(4))), "must be a power of two"),
    "alignment as text": (gguf_head(0, 1, key("general.alignment", 8, text("x"))), "must be a power of two"),
    "cut": (gguf_head(0, 1, ARCHITECTURE)[:-3], "the head ends at"),
    "empty": (b"", "the file is empty"),
}


@pytest.mark.parametrize("case", GGUF)
def test_a_gguf_file_that_lies_is_refused(case: str, tmp_path: Path) -> None:
    data, message = GGUF[case]
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(GgufError, match=f"not a valid GGUF file: .*{message}"):
        GgufFile(tmp_path / "model.gguf")


@pytest.mark.parametrize("value", [array(8, 0), struct.pack("<Q", 0), array(4, 1, bytes(4))], ids=str)
@pytest.mark.parametrize("name", ["llama.attention.head_count", "llama.rope.freq_base", "tokenizer.ggml.eos_token_id"])
def test_metadata_of_another_kind_is_refused(name: str, value: bytes, tmp_path: Path) -> None:
    kind = 8 if len(value) == 8 else 9
    numbers = ["embedding_length", "block_count", "feed_forward_length", "attention.head_count", "context_length"]
    keys = {f"llama.{key}": (4, struct.pack("<I", 1)) for key in numbers} | {"llama.vocab_size": (4, bytes(4))}
    keys |= {"llama.attention.layer_norm_rms_epsilon": (6, struct.pack("<f", 1e-5)), name: (kind, value)}
    body = ARCHITECTURE + b"".join(key(name, kind, value) for name, (kind, value) in keys.items())
    (tmp_path / "model.gguf").write_bytes(gguf_head(0, len(keys) + 1, body))
    with pytest.raises(GgufError):
        GgufFile(tmp_path / "model.gguf").config()


def sparse_strings(path: Path) -> None:
    """Write a gigabyte of empty strings that takes no room on the disk."""
    with path.open("wb") as file:
        file.write(gguf_head(0, 1, key("a", 9, array(8, 2_000_000))))
        file.truncate(2**30)


def many_keys(path: Path) -> None:
    entry = '"%d":{"dtype":"F32","shape":[],"data_offsets":[0,0]}'
    write_safetensors(path, ",".join(entry % number for number in range(300_000)))


def long_metadata(path: Path) -> None:
    write_safetensors(path, '"__metadata__":{' + ",".join(f'"{number}":""' for number in range(2_000_000)) + "}")


def long_shape(path: Path) -> None:
    write_safetensors(path, '"a":{"dtype":"F32","shape":[' + "1," * 9_000_000 + '0],"data_offsets":[0,0]}')


def long_header(path: Path) -> None:
    write_safetensors(path, " " * 75_000_000)


def write_safetensors(path: Path, entries: str) -> None:
    header = f"{{{entries}}}".encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def many_tokens(path: Path) -> None:
    write_tokenizer(path, lambda raw: raw["model"].update(vocab={}))
    file = path / "tokenizer.json"
    tokens = ",".join([f'"{number:x}":0' for number in range(4_100_000)])
    file.write_text(file.read_text().replace('"vocab":{}', f'"vocab":{{{tokens}}}'))


def many_merges(path: Path) -> None:
    write_tokenizer(path, lambda raw: raw["model"].update(type="BPE", merges=[["a", "b"]] * 2_100_000))


def long_token(path: Path) -> None:
    write_tokenizer(path, lambda raw: raw["model"].update(vocab={"u": 0, "a" * 10**7: 1}))


def large_file(path: Path) -> None:
    path.mkdir()
    with (path / "tokenizer.json").open("wb") as file:
        file.truncate(20 * 10**9)


def write_tokenizer(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path.mkdir()
    (path / "tokenizer.json").write_bytes(tokenizer_json(change))


def tokenizer_json(change: Callable[[dict[str, Any]], object]) -> bytes:
    raw = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel({"u": 0, "a": 1}, "u")).to_str())
    change(raw)
    return json.dumps(raw, separators=(",", ":")).encode()


HEAVY: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a GGUF file of empty strings": ("model.gguf", sparse_strings, "general.architecture"),
    "a safetensors header of many keys": ("x.safetensors", many_keys, "tensors; at most 100000"),
    "a safetensors header of much metadata": ("x.safetensors", long_metadata, "keys; at most 500000"),
    "a safetensors header of a long shape": ("x.safetensors", long_shape, "values; at most 1200000"),
    "a safetensors header of 75 MB": ("x.safetensors", long_header, "bytes of header; at most"),
    "a tokenizer of many tokens": ("folder", many_tokens, "parts; at most 4000000"),
    "a tokenizer of many merges": ("folder", many_merges, "objects and lists; at most 2000000"),
    "a tokenizer of a long token": ("folder", long_token, "a token of 10000000 characters; at most 65536"),
    "a tokenizer of 20 GB": ("folder", large_file, "20000000000 bytes; at most 67108864"),
}


@pytest.mark.parametrize("case", HEAVY)
def test_a_heavy_file_is_refused_in_bounded_memory_and_time(case: str, tmp_path: Path) -> None:
    name, write, message = HEAVY[case]
    write(tmp_path / name)
    command = [sys.executable, "-m", "testing.model.run_open", str(tmp_path / name)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    assert found["outcome"].startswith("refused: ")
    assert message in found["outcome"]
    assert found["mib"] < 900  # half of it is torch, for safetensors
    assert found["cpu_s"] < 30


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_a_heavy_json_file_is_refused(name: str, tmp_path: Path) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(10**9)
    with pytest.raises(WeightsError, match=rf"{name}: 1000000000 bytes; at most"):
        weight_files(tmp_path) if "index" in name else HuggingFaceWeights(tmp_path)


def test_travelling_files_have_a_size_by_kind(tmp_path: Path) -> None:
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(2**20 + 1)
    with pytest.raises(FileTooLarge, match=r"chat_template.jinja: 1048577 bytes; at most 1048576 are allowed"):
        read_travelling_files(tmp_path)


def split_by(pattern: str) -> bytes:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return tokenizer_json(lambda raw: raw.update(pre_tokenizer=split))


def normalized_by(*normalizers: dict[str, Any]) -> bytes:
    return tokenizer_json(lambda raw: raw.update(normalizer={"type": "Sequence", "normalizers": list(normalizers)}))


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def test_a_panic_of_the_library_is_named() -> None:
    """Three patterns of this kind ended the whole program."""
    tokenizer = Tokenizer({"tokenizer.json": split_by("a+a+a+a+a+c")})
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_many([text])):
        with pytest.raises(TokenizerLimitError, match=r"library gave up: Onig: .*retry-limit-in-match over"):
            encode("a" * 300)
    assert tokenizer.encode("u")


EXPONENTIAL = ["(a+)+$", "(a|aa)+$", "(x+x+)+y", "((a+))+b", "(?:a*)*b", "(?i:(?:a|b))*c", "([ab]+){9}c", "(a{1,9})+"]


@pytest.mark.parametrize("pattern", EXPONENTIAL)
def test_a_repetition_inside_of_a_repetition_is_refused(pattern: str) -> None:
    for data in (split_by(pattern), normalized_by(replace(pattern, "x", "Regex"))):
        with pytest.raises(TokenizerError, match="a repetition inside of a repetition"):
            Tokenizer({"tokenizer.json": data})


PUBLISHED = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Llama 3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "o200k": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "Bloom": " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
    "DeepSeek": (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "digits by three": r"\d{1,3}(?=(?:\d{3})*\b)",
    "CLIP": r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_patterns_of_published_tokenizers_are_taken(model: str) -> None:
    refuse_exponential(PUBLISHED[model])
    assert Tokenizer({"tokenizer.json": split_by(PUBLISHED[model])}).encode("a u")


GROWING = {
    "six replacements": [replace("a", "a" * 10)] * 6,
    "a chain": [replace(a, b * 9) for a, b in ("ab", "bc", "cd", "de")],
    "a pattern": [replace("a", "a" * 100, "Regex")],
    "what a pattern finds between characters": [replace("(?=a)", "a" * 99, "Regex")] * 2,
    "nothing": [replace("", "a" * 100)],
    "a prefix": [{"type": "Prepend", "prepend": "a" * 100}],
}


@pytest.mark.parametrize("case", GROWING)
def test_a_normalizer_that_multiplies_a_text_is_refused(case: str) -> None:
    with pytest.raises(TokenizerError, match=r"its normalizer may make a text \d+ times longer; at most 64 times"):
        Tokenizer({"tokenizer.json": normalized_by(*GROWING[case])})


def test_a_decoder_that_multiplies_a_token_is_refused() -> None:
    decoder = {"type": "Sequence", "decoders": [replace("a", "a" * 10)] * 6}
    with pytest.raises(TokenizerError, match=r"its decoder may make a text 1000000 times longer"):
        Tokenizer({"tokenizer.json": tokenizer_json(lambda raw: raw.update(decoder=decoder))})


def test_a_text_is_refused_before_normalizing_makes_it_too_long() -> None:
    tokenizer = Tokenizer({"tokenizer.json": normalized_by(replace("a", "a" * 50))})
    assert tokenizer.encode("a" * 100)
    with pytest.raises(
        TokenizerLimitError, match="2000000 characters may be normalized to 100000000; at most 67108864"
    ):
        tokenizer.encode("a" * 2_000_000)


def test_the_normalizers_of_published_tokenizers_are_taken() -> None:
    llama = [{"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")]
    albert = [
        replace("``", '"'),
        replace("''", '"'),
        {"type": "NFKD"},
        {"type": "Lowercase"},
        replace(" {2,}", " ", "Regex"),
    ]
    for normalizers, expected in ((llama, 2), (albert, 1), ([{"type": "NFC"}], 1)):
        assert growth({"type": "Sequence", "normalizers": normalizers}) == expected
        assert Tokenizer({"tokenizer.json": normalized_by(*normalizers)}).encode("a u")
