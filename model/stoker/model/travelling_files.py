"""The files that travel with weights: tokenizer, chat template, generation settings.

Here they are only bytes. No torch.

Read-only. Called by the tokenizer, by the loaders, and by the trainer, whose checkpoints carry the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

MIB = 2**20
TRAVELLING_FILES = MappingProxyType(
    {
        "tokenizer.json": 64 * MIB,
        "tokenizer_config.json": 4 * MIB,
        "special_tokens_map.json": 4 * MIB,
        "added_tokens.json": 4 * MIB,
        "vocab.json": 32 * MIB,
        "merges.txt": 32 * MIB,
        "tokenizer.model": 64 * MIB,
        "chat_template.jinja": MIB,
        "generation_config.json": MIB,
    }
)
"""Name -> bytes that such a file may have. Gemma's tokenizer.json has 33 MB, the largest that is known."""
OTHER_BYTES = 16 * MIB
"""Bytes that a file of another name may have."""


class FileTooLarge(ValueError):
    """A file is larger than its kind may be; it was not read."""


def read_travelling_files(folder: Path) -> Mapping[str, bytes]:
    """Return name -> content of those that the folder has. Raises FileTooLarge."""
    return {name: read_limited(folder / name) for name in TRAVELLING_FILES if (folder / name).is_file()}


def read_limited(path: Path, max_bytes: int | None = None) -> bytes:
    """Return all bytes of a file of at most `max_bytes` (default: what its name allows). Raises FileTooLarge."""
    limit = size_limit(path.name) if max_bytes is None else max_bytes
    check_size(str(path), path.stat().st_size, limit)
    with path.open("rb") as file:
        data = file.read(limit + 1)
    check_size(str(path), len(data), limit)
    return data


def check_size(name: str, size: int, limit: int) -> None:
    """Refuse a file that is too large. Raises FileTooLarge."""
    if size > limit:
        raise FileTooLarge(f"{name}: {size} bytes; at most {limit} are allowed")


def size_limit(name: str) -> int:
    """Return the bytes that a file of this name may have."""
    return TRAVELLING_FILES.get(name, OTHER_BYTES)
