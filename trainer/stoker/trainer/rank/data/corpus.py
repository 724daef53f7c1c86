"""The corpus of a run: every source tokenised and packed, ready to be read at random.

`open_corpus` is called by every rank; one per pod does the work and leaves it in `data.cache_dir`, the others wait for
it.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from stoker.trainer.errors import DataError
from stoker.trainer.protocol.config import DataConfig, DataSourceConfig, TrainerConfig
from stoker.trainer.rank.data.cache import cache_lock, content_digest
from stoker.trainer.rank.data.differences import Facts
from stoker.trainer.rank.data.files import DataFile, list_files, stored_bytes, text_bytes
from stoker.trainer.rank.data.pack import Packing, pack
from stoker.trainer.rank.data.percent import Report, percent_report
from stoker.trainer.rank.data.shard import Encoder, Shard, open_shard, remove_abandoned, write_shard
from stoker.trainer.rank.data.source import data_files, kind_of, read_documents, token_facts
from stoker.trainer.rank.data.unchanged_files import UnchangedFiles

FORMAT = 1
"""Part of every name in the cache. Change it with tokenising or packing."""


@dataclass(frozen=True)
class PackedSource:
    """One source, cut into sequences."""

    name: str
    shard: Shard
    packing: Packing
    targets: NDArray[np.int64]
    """[sequences]; the number of positions that count in the loss."""

    def __len__(self) -> int:
        return len(self.packing)


class SourceDigests(NamedTuple):
    """Digests of all that decides what a source gives."""

    tokens: str
    """Of its tokens; the name of its shard in the cache."""
    documents: str
    """Of its documents, before they are tokenised."""


@dataclass(frozen=True)
class Corpus:
    sources: tuple[PackedSource, ...]
    weights: tuple[float, ...]
    validation: tuple[PackedSource, ...]
    """The validation source, or the held-out part of each source; empty without validation."""
    vocab_size: int
    """The tokenizer's, at most the model's; every token is smaller."""
    pad_id: int
    facts: Facts
    """Everything that decides the tokens of a sample: contents, tokenizer, sequence length, packing, weights, held-out
    share."""

    @property
    def fingerprint(self) -> str:
        """Digest of the facts, as old checkpoints have it: that of a source covers its contents and the tokenizer."""
        return _digest({name: value for name, value in self.facts.items() if name not in ("tokenizer", "contents")})

    @property
    def num_sequences(self) -> int:
        return sum(len(source) for source in self.sources)


def open_corpus(
    config: TrainerConfig, encoder: Encoder, *, model_vocab_size: int | None = None, report: Report = lambda _: None
) -> Corpus:
    """Tokenise the sources that are not in the cache, and open all of them. `report` gets lines about progress.

    Raises:
        DataError: a source is missing, empty or unreadable, or has tokens outside the model's vocabulary.
    """
    _check_vocabulary(config, encoder, model_vocab_size)
    data, cache = config.data, cache_folder(config)
    held_out = data.validation.fraction if data.validation is not None else None
    digests: list[SourceDigests] = []
    sources: list[PackedSource] = []
    held: list[PackedSource] = []
    for source in data.sources:
        digest, shard = _shard(source, encoder, cache, report)
        chosen = _held_out(source, shard, held_out)
        sources.append(_packed(source.name, shard, ~chosen, config))
        if chosen.any():
            held.append(_packed(source.name, shard, chosen, config))
        digests.append(digest)
    return Corpus(
        sources=tuple(sources),
        weights=tuple(source.weight for source in data.sources),
        validation=_validation(config, encoder, cache, report) or tuple(held),
        vocab_size=encoder.vocab_size,
        pad_id=encoder.pad_id,
        facts=_facts(config, encoder, digests),
    )


def cache_folder(config: TrainerConfig) -> Path:
    return Path(config.data.cache_dir) if config.data.cache_dir else Path(config.work_dir) / "tokens"


def _check_vocabulary(config: TrainerConfig, encoder: Encoder, model_vocab_size: int | None) -> None:
    size = model_vocab_size or (config.model or {}).get("vocab_size")
    if size is not None and encoder.vocab_size > size:
        raise DataError(
            f"the tokenizer has {encoder.vocab_size} tokens, the model's vocabSize is {size}; it must not be smaller "
            "(for a tokenizer that is trained, data.tokenizer.vocabSize sets its size)"
        )


def _shard(source: DataSourceConfig, encoder: Encoder, cache: Path, report: Report) -> tuple[SourceDigests, Shard]:
    files = data_files(source, list_files(source))
    with cache_lock(cache, report) as report_to_all:
        remove_abandoned(cache, time.time())
        unchanged = UnchangedFiles(source.name, files)
        digests = _digests(source, files, encoder, cache, report_to_all)
        folder = cache / digests.tokens
        if not folder.is_dir():
            documents = read_documents(source, files, encoder.end_id)
            write_shard(
                folder,
                unchanged.documents(documents),
                encoder,
                percent_report(report_to_all, f"Tokenizing {source.name}", text_bytes(files)),
            )
    shard = open_shard(folder)
    if (shard.lengths > 1).sum() == 0:
        raise DataError(f"data source {source.name}: {source.place} holds no document ({len(files)} files, all empty)")
    return digests, shard


def _digests(
    source: DataSourceConfig, files: list[DataFile], encoder: Encoder, cache: Path, report: Report
) -> SourceDigests:
    contents = content_digest(files, cache, percent_report(report, f"Hashing {source.name}", stored_bytes(files)))
    facts = {"format": FORMAT, "contents": contents, **_forms(source, files)}
    return SourceDigests(_digest({**facts, "tokenizer": encoder.fingerprint}), _digest(facts))


def _forms(source: DataSourceConfig, files: list[DataFile]) -> dict[str, Any]:
    """What decides the documents of the files beside their contents; text and JSONL have the keys of old caches."""
    kinds = [kind_of(source, file) for file in files]
    found: dict[str, Any] = {"jsonl": [kind == "jsonl" for kind in kinds]}
    if "parquet" in kinds:
        found["parquet"] = [kind == "parquet" for kind in kinds]
    if "tokens" in kinds:
        found["tokens"] = [[facts.dtype, facts.eos_token_id] for facts in map(token_facts, files)]
    return found


def _held_out(source: DataSourceConfig, shard: Shard, fraction: float | None) -> NDArray[np.bool_]:
    """[documents]; True for documents of the validation set: those with the smallest content hashes.

    So growth of the corpus moves few of them, and equal documents stay together.
    """
    if fraction is None:
        return np.zeros(len(shard), dtype=bool)
    count = max(1, math.floor(fraction * len(shard)))
    chosen: NDArray[np.bool_] = shard.hashes <= np.sort(shard.hashes)[count - 1]
    if chosen.all():
        raise DataError(
            f"data source {source.name}: a validation fraction of {fraction} "
            f"holds out all of its {len(shard)} documents; "
            "at least two different ones are needed"
        )
    return chosen


def _packed(name: str, shard: Shard, chosen: NDArray[np.bool_], config: TrainerConfig) -> PackedSource:
    """Pack the `chosen` documents into sequences of the configured length."""
    length = config.training.sequence_length
    tokens = np.where(chosen, shard.lengths, 0)
    if shard.learned is not None:
        tokens[_nothing_to_learn(shard, length)] = 0
    if (tokens > 1).sum() == 0:
        raise DataError(f"data source {name}: {_why_empty(shard, chosen, length)}")
    packing = pack(tokens, shard.whole, length, several=config.data.packing)
    return PackedSource(name, shard, packing, _targets(shard, packing))


def _why_empty(shard: Shard, chosen: NDArray[np.bool_], length: int) -> str:
    """Return the reason why the `chosen` documents have no sequence."""
    if (shard.whole[chosen] == 1).any():
        return (
            f"the first {length} tokens of every conversation hold no token of the assistant; "
            "training.sequenceLength must be larger"
        )
    return (
        f"none of {chosen.sum()} documents of {len(shard)} (data.validation.fraction decides which) has the two tokens "
        "that a prediction needs; leave such documents out"
    )


def _nothing_to_learn(shard: Shard, length: int) -> NDArray[np.bool_]:
    """[documents]; True for conversations that are cut before their first token that counts."""
    assert shard.learned is not None
    seen = np.concatenate([[0], np.cumsum(shard.learned, dtype=np.int64)])
    first_target = np.minimum(shard.offsets[:-1] + 1, shard.offsets[1:])
    last_target = np.minimum(shard.offsets[:-1] + length + 1, shard.offsets[1:])
    nothing: NDArray[np.bool_] = (shard.whole == 1) & (seen[last_target] == seen[first_target])
    return nothing


def _targets(shard: Shard, packing: Packing) -> NDArray[np.int64]:
    document, start, length = packing.spans.T
    counts = length
    if shard.learned is not None:
        seen = np.concatenate([[0], np.cumsum(shard.learned, dtype=np.int64)])
        begin = shard.offsets[document] + start + 1
        counts = seen[begin + length] - seen[begin]
    return np.add.reduceat(counts, packing.first[:-1])


def _validation(config: TrainerConfig, encoder: Encoder, cache: Path, report: Report) -> tuple[PackedSource, ...]:
    wanted = config.data.validation
    if wanted is None or wanted.source is None:
        return ()
    _, shard = _shard(wanted.source, encoder, cache, report)
    return (_packed(wanted.source.name, shard, np.ones(len(shard), dtype=bool), config),)


def _facts(config: TrainerConfig, encoder: Encoder, digests: list[SourceDigests]) -> Facts:
    data: DataConfig = config.data
    sources = list(zip(data.sources, digests, strict=True))
    return {
        "sources": [[source.name, source.weight, digest.tokens] for source, digest in sources],
        "contents": {source.name: digest.documents for source, digest in sources},
        "tokenizer": encoder.fingerprint,
        "sequence_length": config.training.sequence_length,
        "packing": data.packing,
        "held_out": data.validation.fraction if data.validation is not None else None,
    }


def _digest(facts: object) -> str:
    return blake3(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
