"""A byte-level tokenizer of 320 tokens, with merges that cross the parts of JSON values."""

from __future__ import annotations

import json

from stoker.model.tokenizer import BYTE_OF_CHARACTER

VOCABULARY = 320
EOS = 2
SPECIAL = ("<unk>", "<s>", "</s>")
WORDS = (
    '{"',
    '":',
    '",',
    '"}',
    "true",
    "false",
    "null",
    "name",
    "age",
    "tags",
    "[]",
    "{}",
    "},",
    "10",
    "yes",
    "no",
    "Ġa",
)


def tokenizer_json() -> bytes:
    """The tokenizer.json of a vocabulary: special tokens, all bytes, merged words."""
    vocabulary = {text: number for number, text in enumerate((*SPECIAL, *BYTE_OF_CHARACTER))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                merges.append((word[: end - 1], word[end - 1]))
                vocabulary[word[:end]] = len(vocabulary)
    added = [
        {"id": number, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for number, text in enumerate(SPECIAL)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [list(pair) for pair in merges], "unk_token": "<unk>"}
    content = {
        "version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": byte_level,
        "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    return json.dumps(content).encode()
