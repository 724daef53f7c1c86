"""A tokenised source on disk: memory-mapped arrays that every rank of a pod shares.

A shard folder appears whole (written aside, then renamed) and never changes; its name identifies the contents and
the tokenizer.

Written and opened by `corpus`.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.trainer.errors import DataError
from stoker.trainer.rank.data.batch import Array
from stoker.trainer.rank.data.cache import ASIDE, aside_of, name_folder
from stoker.trainer.rank.data.read_ahead import read_ahead
from stoker.trainer.rank.data.source import Conversation, Document, Tokens

BATCH_CHARACTERS = 1 << 20
"""Size of the batches that are given to the tokenizer."""
ABANDONED_S = 600.0
"""Time without growth after which a half-written shard is that of a process that died. Locks alone do not tell: the
folder may be shared with nodes that they do not reach."""


@dataclass(frozen=True)
class Encoded:
    """A document as token ids. `learned` is True for each token that may be a target; None means all of them."""

    ids: Sequence[int]
    learned: Sequence[bool] | None = None


class Encoder(Protocol):
    """Turns documents into tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def pad_id(self) -> int: ...

    @property
    def end_id(self) -> int | None:
        """The token that ends a text; None if there is none."""
        ...

    @property
    def fingerprint(self) -> str:
        """Differs whenever the same text may become other tokens."""
        ...

    def encode(self, documents: Sequence[Document]) -> list[Encoded]: ...


@dataclass(frozen=True)
class Shard:
    """The tokens of all documents of a source, end to end."""

    folder: Path
    tokens: Array
    """uint16 or uint32 [tokens]"""
    learned: NDArray[np.uint8] | None
    """[tokens]; 0 for a token that is never a target. None: every token may be one."""
    offsets: NDArray[np.int64]
    """[documents + 1]; the start of each document."""
    whole: NDArray[np.uint8]
    """[documents]; 1 for a conversation, which is shortened where plain text would be split."""
    hashes: NDArray[np.uint64]
    """[documents]; content hashes, which decide what is held out for validation."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.offsets)


def write_shard(folder: Path, documents: Iterator[Document], encoder: Encoder, progress: Callable[[int], None]) -> None:
    """Tokenise `documents` into `folder`; `progress` gets the count of characters so far.

    Raises:
        DataError: a document cannot be read or encoded.
    """
    aside = aside_of(folder)
    aside.mkdir(parents=True)
    try:
        with (aside / "tokens.bin").open("wb") as tokens, (aside / "learned.bin").open("wb") as learned:
            written = _Written(tokens, learned, encoder)
            for batch in read_ahead(_batches(documents)):
                written.add(batch)
                progress(written.characters)
        written.save_index(aside)
        name_folder(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_abandoned(cache: Path, unix_s: float) -> None:
    """Remove what killed processes have left of shards."""
    for aside in cache.glob(f"*.{ASIDE}"):
        if aside.is_dir() and _grown_s(aside) < unix_s - ABANDONED_S:
            shutil.rmtree(aside, ignore_errors=True)


def _grown_s(folder: Path) -> float:
    """When a file in it grew last; infinite for a folder that has just gone."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except FileNotFoundError:
        return math.inf


def open_shard(folder: Path) -> Shard:
    """Map a shard that `write_shard` made.

    Raises:
        DataError: a file of it is missing or has the wrong size (delete the folder to tokenise again).
    """
    try:
        facts = json.loads((folder / "shard.json").read_text())
        tokens = _map(folder / "tokens.bin", np.dtype(facts["dtype"]))
        learned = _map(folder / "learned.bin", np.dtype(np.uint8)) if facts["masked"] else None
        index = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("offsets", "whole", "hashes")}
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"tokenised shard {folder}: {error}; delete the folder and start again") from error
    shard = Shard(folder=folder, tokens=tokens, learned=learned, **index)
    if len(tokens) != shard.offsets[-1] or (learned is not None and len(learned) != len(tokens)):
        raise DataError(f"tokenised shard {folder} is cut short; delete the folder and start again")
    return shard


class _Written:
    """The growing files of a shard."""

    def __init__(self, tokens: BinaryIO, learned: BinaryIO, encoder: Encoder) -> None:
        self.tokens, self.learned, self.encoder = tokens, learned, encoder
        self.dtype = np.dtype(np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32)
        self.offsets, self.whole, self.hashes = array("q", [0]), array("B"), array("Q")
        self.masked = False
        self.characters = 0

    def add(self, documents: Sequence[Document]) -> None:
        others = [document for document in documents if not isinstance(document, Tokens)]
        of_texts = iter(self.encoder.encode(others) if others else [])
        for document in documents:
            encoded = Encoded([]) if isinstance(document, Tokens) else next(of_texts)
            ids = np.asarray(document.ids if isinstance(document, Tokens) else encoded.ids, dtype=np.int64)
            if len(ids) and not 0 <= ids.min() <= ids.max() < self.encoder.vocab_size:
                gave = f"{document.where} holds" if isinstance(document, Tokens) else "the tokenizer gave"
                raise DataError(
                    f"{gave} token {ids.max()}, the tokenizer's vocabulary ends at {self.encoder.vocab_size}"
                )
            self.tokens.write(ids.astype(self.dtype).tobytes())
            self._add_mask(encoded, len(ids))
            self.offsets.append(self.offsets[-1] + len(ids))
            self.whole.append(isinstance(document, Conversation))
            self.hashes.append(content_hash(document))
            self.characters += characters(document)

    def _add_mask(self, encoded: Encoded, count: int) -> None:
        """Write the mask of one document. The file is kept only if some document has tokens that are not learned."""
        mask = (
            np.ones(count, dtype=np.uint8) if encoded.learned is None else np.asarray(encoded.learned, dtype=np.uint8)
        )
        if len(mask) != count:
            raise DataError(f"the tokenizer gave {count} tokens with a mask of {len(mask)}")
        self.masked = self.masked or encoded.learned is not None
        self.learned.write(mask.tobytes())

    def save_index(self, folder: Path) -> None:
        for name, dtype in (("offsets", np.int64), ("whole", np.uint8), ("hashes", np.uint64)):
            np.save(folder / f"{name}.npy", np.array(getattr(self, name), dtype=dtype))
        if not self.masked:
            (folder / "learned.bin").unlink()
        (folder / "shard.json").write_text(json.dumps({"dtype": self.dtype.name, "masked": self.masked}))


def content_hash(document: Document) -> int:
    """64-bit hash of the content: equal texts always fall on the same side of a split."""
    if isinstance(document, Tokens):
        return int.from_bytes(hashlib.blake2b(document.ids.astype("<u4").tobytes(), digest_size=8).digest(), "little")
    content = json.dumps(document.messages) if isinstance(document, Conversation) else document.text
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "little")


def characters(document: Document) -> int:
    """Size of a document, about as its file counts it."""
    if isinstance(document, Tokens):
        return 2 * len(document.ids)
    if isinstance(document, Conversation):
        return sum(len(message["content"]) for message in document.messages)
    return len(document.text)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += characters(document)
        if size >= BATCH_CHARACTERS or len(batch) >= 4096:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _map(file: Path, dtype: np.dtype[Any]) -> Array:
    if file.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r")
