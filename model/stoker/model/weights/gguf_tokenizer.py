"""A tokenizer from GGUF metadata: byte-level BPE (`gpt2`) as the files of a Hugging Face folder. No torch.

Pure; called by `gguf_weights` and `tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stoker.model.weights.gguf_file import GgufError, GgufFile

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, byte_level(use_regex=False)]}


DIGITS_ALONE = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)],
}
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "default": byte_level(use_regex=True),
    "gpt-2": byte_level(use_regex=True),
    "smollm": DIGITS_ALONE,
    "starcoder": DIGITS_ALONE,
    "refact": DIGITS_ALONE,
    "llama-bpe": split_by(CONTRACTIONS + r"\p{N}{1,3}" + REST),
    "qwen2": split_by(CONTRACTIONS + r"\p{N}" + REST),
}
"""`tokenizer.ggml.pre` -> how text is cut before merging."""
TAKES_WHOLE_WORDS = frozenset({"llama-bpe"})
"""Pre-tokenizers with which a word of the vocabulary is one token, whatever the merges are."""
NORMALIZES = frozenset({"qwen2"})
"""Text becomes NFC first."""
CONTROL, USER_DEFINED = 3, 4
"""`tokenizer.ggml.token_type` of tokens that are matched before any cutting."""


def tokenizer_files(file: GgufFile) -> Mapping[str, bytes]:
    """Return tokenizer.json, tokenizer_config.json, generation_config.json and, if any, chat_template.jinja."""
    with file.checked():
        return read_tokenizer_files(file)


def read_tokenizer_files(file: GgufFile) -> Mapping[str, bytes]:
    files = {
        "tokenizer.json": as_json(tokenizer_json(file)),
        "tokenizer_config.json": as_json(tokenizer_config(file)),
        "generation_config.json": as_json(generation_config(file)),
    }
    if template := file.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = str(template).encode()
    return files


def tokenizer_json(file: GgufFile) -> dict[str, Any]:
    """Return tokenizer.json as the `tokenizers` library reads it."""
    if (model := file.get("tokenizer.ggml.model")) != "gpt2":
        raise GgufError(
            f"{file.path}: not supported yet: tokenizer.ggml.model {model!r}; allowed: gpt2 (byte-level BPE)"
        )
    kind = str(file.get("tokenizer.ggml.pre", "default"))
    if kind not in PRE_TOKENIZERS:
        raise GgufError(
            f"{file.path}: not supported yet: tokenizer.ggml.pre {kind!r}; allowed: {', '.join(PRE_TOKENIZERS)}"
        )
    if file.get("tokenizer.ggml.add_eos_token", False):
        raise GgufError(f"{file.path}: not supported yet: tokenizer.ggml.add_eos_token True")
    tokens = list(file.need("tokenizer.ggml.tokens"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(tokens, list(file.get("tokenizer.ggml.token_type", []))),
        "normalizer": {"type": "NFC"} if kind in NORMALIZES else None,
        "pre_tokenizer": PRE_TOKENIZERS[kind],
        "post_processor": post_processor(file, tokens, kind),
        "decoder": byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": kind in TAKES_WHOLE_WORDS,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in file.need("tokenizer.ggml.merges")],
        },
    }


def added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Return the added tokens: control tokens are special (hidden in decoded text), user-defined ones are not."""
    return [
        {
            "id": number,
            "content": tokens[number],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for number, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]


def post_processor(file: GgufFile, tokens: list[str], kind: str) -> dict[str, Any] | None:
    """Return what puts the begin-of-text token in front, where the file has that set.

    For llama-bpe that is the default.
    """
    bos = file.token_id("bos")
    if bos is None or not file.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe"):
        return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    token = tokens[bos]
    single = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    tokens = file.need("tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: file.token_id(key) for name, key in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(file.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.size("context_length"),
    } | {name: tokens[number] for name, number in special.items() if number is not None}


def generation_config(file: GgufFile) -> dict[str, Any]:
    config = file.config()
    ids = {"bos_token_id": config.bos_token_id, "pad_token_id": config.pad_token_id}
    eos = list(config.eos_token_ids) if len(config.eos_token_ids) != 1 else config.eos_token_ids[0]
    return {name: number for name, number in ids.items() if number is not None} | (
        {"eos_token_id": eos} if config.eos_token_ids else {}
    )


def as_json(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode()
