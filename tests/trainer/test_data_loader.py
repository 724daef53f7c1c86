"""The loader: micro-batches of each rank for any layout, step and restart."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.pod.config_file import ConfigError, parse
from stoker.trainer.errors import DataError
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.data.corpus import open_corpus
from stoker.trainer.rank.data.differences import differences
from stoker.trainer.rank.data.files import LocalFile
from stoker.trainer.rank.data.loader import Loader
from stoker.trainer.rank.data.shard import Encoded
from stoker.trainer.rank.data.source import Conversation, Document, Text, Tokens
from stoker.trainer.rank.data.unchanged_files import UnchangedFiles
from testing.forked import forked


@dataclass(frozen=True)
class Bytes:
    """A token per byte; 256 ends a document, 257 a message, 258 pads."""

    vocab_size: int = 259
    pad_id: int = 258
    end_id: int = 256
    fingerprint: str = "bytes"

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        return [self._encode(document) for document in documents]

    def _encode(self, document: Document) -> Encoded:
        assert not isinstance(document, Tokens)
        if not isinstance(document, Conversation):
            return Encoded([*document.text.encode(), *([256] if document.ends else [])])
        ids: list[int] = []
        learned: list[bool] = []
        for message in document.messages:
            said = [*message["content"].encode(), 257]
            ids += said
            learned += [message["role"] == "assistant"] * len(said)
        return Encoded(ids, learned)


def config_for(tmp_path: Path, data: dict[str, Any], **training: Any) -> TrainerConfig:
    sizes = {"total_steps": 10, "global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 32, **training}
    return parse(
        TrainerConfig,
        {
            "job": {"name": "job", "uid": "uid", "writer": "0a1b2c3d"},
            "termination_log": str(tmp_path / "termination-log"),
            "work_dir": str(tmp_path / "work"),
            "model": {"vocab_size": 259},
            "training": sizes,
            "data": data,
            "checkpoint": {"root": str(tmp_path / "checkpoints")},
        },
    )


def text_source(tmp_path: Path, name: str = "books", documents: int = 30, weight: float = 1.0) -> dict[str, Any]:
    """Return documents of 5 to 75 characters: `name` and a number, repeated."""
    lengths = np.random.default_rng(len(name)).integers(5, 75, documents)
    lines = [json.dumps({"text": (f"{name}{i} " * 40)[:length]}) for i, length in enumerate(lengths)]
    (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return {"name": name, "path": str(tmp_path / f"{name}.jsonl"), "weight": weight}


def loader_for(tmp_path: Path, data: dict[str, Any], **training: Any) -> Loader:
    config = config_for(tmp_path, data, **training)
    return Loader(open_corpus(config, Bytes()), config)


def flat(batch: MicroBatch) -> tuple[Any, ...]:
    return (
        batch.tokens_T.tolist(),
        batch.positions_T.tolist(),
        batch.targets_T.tolist(),
        batch.weights_T.tolist(),
        batch.cu_seqlens.tolist(),
        batch.max_seqlen,
    )


def step_of(loader: Loader, step: int, dp_size: int) -> list[tuple[Any, ...]]:
    return [flat(batch) for rank in range(dp_size) for batch in loader.micro_batches(step, rank, dp_size)]


@pytest.mark.parametrize("packing", [True, False])
def test_every_layout_sees_the_same_global_micro_batches(tmp_path: Path, packing: bool) -> None:
    data = {
        "sources": [text_source(tmp_path), text_source(tmp_path, "wiki", weight=0.3)],
        "packing": packing,
    }
    loader = loader_for(tmp_path, data)
    for step in (0, 1, 9, 1000):
        assert step_of(loader, step, 1) == step_of(loader, step, 2) == step_of(loader, step, 4)


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    data = {"sources": [text_source(tmp_path)]}
    before = loader_for(tmp_path, data)
    cursor = json.loads(json.dumps(before.cursor(5)))
    after = loader_for(tmp_path, data)
    after.check(cursor)
    assert [step_of(after, step, 2) for step in range(5, 9)] == [step_of(before, step, 1) for step in range(5, 9)]


def test_packed_documents_keep_apart(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": "de"}')
    data = {"sources": [{"name": "a", "path": str(tmp_path / "a.jsonl")}]}
    loader = loader_for(tmp_path, data, global_batch_size=1, micro_batch_size=1, sequence_length=8)
    (batch,) = loader.micro_batches(0, 0, 1)
    assert flat(batch) == (
        [97, 98, 99, 100, 101, 258, 258, 258],
        [0, 1, 2, 0, 1, 0, 1, 2],
        [98, 99, 256, 101, 256, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [0, 3, 5, 8],
        3,
    )
    assert loader.target_tokens(0) == 5


def test_an_unpacked_document_has_a_sequence_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": "de"}')
    data = {"sources": [{"name": "a", "path": str(tmp_path / "a.jsonl")}], "packing": False}
    loader = loader_for(tmp_path, data, global_batch_size=2, micro_batch_size=2, sequence_length=4)
    (batch,) = loader.micro_batches(0, 0, 1)
    assert batch.cu_seqlens.tolist() in ([0, 3, 4, 6, 8], [0, 2, 4, 7, 8])
    assert batch.weights_T.sum() == loader.target_tokens(0) == 5


def test_an_over_long_document_is_split_and_every_target_is_trained_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij")
    loader = loader_for(
        tmp_path,
        {"sources": [{"name": "a", "path": str(tmp_path / "a.txt")}]},
        global_batch_size=3,
        micro_batch_size=3,
        sequence_length=4,
    )
    (batch,) = loader.micro_batches(0, 0, 1)
    assert sorted(batch.targets_T[batch.weights_T > 0].tolist()) == [*b"bcdefghij", 256]
    assert loader.steps_in(epochs=1) == 1


def test_a_conversation_trains_only_what_the_assistant_says(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    data = {"sources": [{"name": "a", "path": str(tmp_path / "a.jsonl")}]}
    loader = loader_for(tmp_path, data, global_batch_size=1, micro_batch_size=1, sequence_length=8)
    (batch,) = loader.micro_batches(0, 0, 1)
    assert batch.targets_T[batch.weights_T > 0].tolist() == [*b"2", 257]
    assert loader.target_tokens(0) == 2


def test_a_long_conversation_keeps_its_beginning_and_one_without_an_answer_in_it_is_left_out(tmp_path: Path) -> None:
    lines = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "abcdefgh"}],
        [{"role": "user", "content": "q" * 20}, {"role": "assistant", "content": "a"}],
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in lines))
    data = {"sources": [{"name": "a", "path": str(tmp_path / "a.jsonl")}]}
    loader = loader_for(tmp_path, data, global_batch_size=1, micro_batch_size=1, sequence_length=6)
    assert loader.corpus.num_sequences == 1
    (batch,) = loader.micro_batches(0, 0, 1)
    assert batch.targets_T[batch.weights_T > 0].tolist() == [*b"abcde"]


def test_target_tokens_count_what_all_ranks_train(tmp_path: Path) -> None:
    loader = loader_for(tmp_path, {"sources": [text_source(tmp_path), text_source(tmp_path, "wiki")]})
    for step in range(4):
        batches = [batch for rank in range(2) for batch in loader.micro_batches(step, rank, 2)]
        assert loader.target_tokens(step) == sum(batch.weights_T.sum() for batch in batches)


def test_weights_set_the_shares_of_the_sources(tmp_path: Path) -> None:
    sources = [text_source(tmp_path, weight=3), text_source(tmp_path, "wiki", weight=1)]
    loader = loader_for(tmp_path, {"sources": sources}, global_batch_size=400)
    first = loader.order.samples(0, 400)
    assert sum(place.source == 0 for place in first) == 300


def test_the_held_out_fraction_is_never_trained_and_always_validated(tmp_path: Path) -> None:
    data = {
        "sources": [text_source(tmp_path, documents=40), text_source(tmp_path, "wiki", documents=20)],
        "validation": {"fraction": 0.2, "max_sequences": 1000},
    }
    loader = loader_for(tmp_path, data)

    def documents(parts: Sequence[Any]) -> list[set[int]]:
        return [set(part.packing.spans[:, 0].tolist()) for part in parts]

    for source, (trained, held) in enumerate(
        zip(documents(loader.corpus.sources), documents(loader.corpus.validation), strict=True)
    ):
        assert trained.isdisjoint(held)
        assert len(trained | held) == (40, 20)[source]
        assert len(held) == (8, 4)[source]


def test_validation_is_the_same_for_every_layout_and_as_long_on_every_rank(tmp_path: Path) -> None:
    data = {
        "sources": [text_source(tmp_path)],
        "validation": {"source": text_source(tmp_path, "held", documents=17), "max_sequences": 5},
    }
    loader = loader_for(tmp_path, data)
    alone = [flat(batch) for batch in loader.validation(0, 1)]
    shared = [[flat(batch) for batch in loader.validation(rank, 4)] for rank in range(4)]
    assert len(alone) == 3
    assert {len(batches) for batches in shared} == {1}
    joined = [batch for batches in shared for batch in batches]
    assert joined[:3] == alone
    assert sum(joined[3][3]) == 0


def test_without_validation_there_is_nothing_to_validate(tmp_path: Path) -> None:
    assert list(loader_for(tmp_path, {"sources": [text_source(tmp_path)]}).validation(0, 1)) == []


def test_the_corpus_is_tokenised_once(tmp_path: Path) -> None:
    data = {"sources": [text_source(tmp_path)]}
    loader_for(tmp_path, data)
    shards = {file: file.stat().st_mtime_ns for file in (tmp_path / "work" / "tokens").rglob("*.bin")}
    loader_for(tmp_path, data)
    assert shards
    assert shards == {file: file.stat().st_mtime_ns for file in (tmp_path / "work" / "tokens").rglob("*.bin")}


def fingerprint_of(folder: str) -> str:
    data = {"sources": [{"name": "books", "path": f"{folder}/books.jsonl"}]}
    return loader_for(Path(folder), data).fingerprint


def test_ranks_that_start_together_share_one_shard(tmp_path: Path) -> None:
    text_source(tmp_path, documents=3000)
    with forked().Pool(3) as pool:
        fingerprints = pool.map(fingerprint_of, [str(tmp_path)] * 3)
    assert len(set(fingerprints)) == 1
    assert [file.name for file in (tmp_path / "work" / "tokens").rglob("*.bin")] == ["tokens.bin"]


def test_the_same_contents_elsewhere_are_the_same_corpus(tmp_path: Path) -> None:
    first = loader_for(tmp_path, {"sources": [text_source(tmp_path)]})
    (tmp_path / "moved").mkdir()
    (tmp_path / "books.jsonl").rename(tmp_path / "moved" / "other.jsonl")
    second = loader_for(tmp_path, {"sources": [{"name": "books", "path": str(tmp_path / "moved")}]})
    assert first.fingerprint == second.fingerprint


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"documents": 31}, "data.sources books has other contents, or another format"),
        ({"weight": 2.0}, "data.sources books had weight 1.0, has 2.0"),
        ({"name": "wiki"}, "data.sources wiki is new; data.sources books is missing"),
    ],
    ids=["contents", "weight", "name"],
)
def test_a_checkpoint_of_another_corpus_is_refused_with_what_differs(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    cursor = json.loads(json.dumps(loader_for(tmp_path, {"sources": [text_source(tmp_path)]}).cursor(3)))
    other = loader_for(tmp_path, {"sources": [text_source(tmp_path, **change)]})
    with pytest.raises(DataError, match=f"differs from that of the checkpoint at step 3: {named}; go on with that"):
        other.check(cursor)
    del cursor["corpus"]  # as earlier versions wrote it
    with pytest.raises(DataError, match="the data differs from that of the checkpoint at step 3: fingerprint was"):
        other.check(cursor)


def test_a_checkpoint_of_another_tokenizer_is_refused_by_the_tokenizer_and_names_only_sources_that_changed(
    tmp_path: Path,
) -> None:
    def loader(fingerprint: str, **change: Any) -> Loader:
        sources = [text_source(tmp_path, **change), text_source(tmp_path, "wiki")]
        config = config_for(tmp_path, {"sources": sources})
        return Loader(open_corpus(config, Bytes(fingerprint=fingerprint)), config)

    cursor = json.loads(json.dumps(loader("of 30").cursor(3)))
    tokenizer = r"data.tokenizer is another: its fingerprint was of 30, is of 31 \(one of kind train .*\)"
    with pytest.raises(DataError, match=f"at step 3: {tokenizer}; go on with that"):
        loader("of 31").check(cursor)
    with pytest.raises(DataError, match=f"{tokenizer}; data.sources books has other contents, or another format; go"):
        loader("of 31", documents=31).check(cursor)


def test_an_equal_corpus_goes_on_from_a_checkpoint_of_an_earlier_version(tmp_path: Path) -> None:
    loader = loader_for(tmp_path, {"sources": [text_source(tmp_path)]})
    loader.check({name: value for name, value in loader.cursor(3).items() if name != "corpus"})
    loader.check(json.loads(json.dumps(loader.cursor(3))))


CONTENTS = "data.sources {} has other contents, or another format or tokenizer"
FRACTION = "data.validation.fraction was none, is 0.1"
BEFORE: dict[str, Any] = {
    "sources": [["a", 1.0, "x"], ["b", 2.0, "y"]],
    "sequence_length": 32,
    "packing": True,
    "held_out": None,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"sources": [["a", 1.0, "z"], ["b", 2.0, "y"]]}, [CONTENTS.format("a")]),
        ({"sequence_length": 64}, ["training.sequenceLength was 32, is 64"]),
        ({"packing": False, "held_out": 0.1}, ["data.packing was true, is false", FRACTION]),
        ({"sources": [["a", 1.0, "x"]]}, ["data.sources b is missing"]),
        ({"sources": BEFORE["sources"][::-1]}, ["data.sources were in the order a, b, are in the order b, a"]),
    ],
    ids=["nothing", "contents of an earlier version", "length", "packing and validation", "a source less", "order"],
)
def test_each_difference_of_two_corpora_is_named(change: dict[str, Any], expected: list[str]) -> None:
    assert differences(BEFORE, BEFORE | change) == expected


@pytest.mark.parametrize(
    ("training", "named"),
    [
        ({"seed": 4}, "seed was 0, is 4"),
        ({"global_batch_size": 16}, "samples was 24, is 48; globalBatchSize was 8, is 16"),
    ],
)
def test_a_checkpoint_of_another_order_is_refused(tmp_path: Path, training: dict[str, Any], named: str) -> None:
    data = {"sources": [text_source(tmp_path)]}
    cursor = loader_for(tmp_path, data).cursor(3)
    with pytest.raises(DataError, match=named):
        loader_for(tmp_path, data, **training).check(cursor)


@pytest.mark.parametrize("cursor", [{}, {"step": "3"}, {"step": -1}, {"step": True}])
def test_a_broken_cursor_is_refused(tmp_path: Path, cursor: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="no usable step"):
        loader_for(tmp_path, {"sources": [text_source(tmp_path)]}).check(cursor)


def test_batches_that_do_not_share_out_are_refused_with_the_arithmetic(tmp_path: Path) -> None:
    data = {"sources": [text_source(tmp_path)]}
    with pytest.raises(ConfigError, match="globalBatchSize 8 is not a multiple of microBatchSize 3"):
        loader_for(tmp_path, data, micro_batch_size=3)
    with pytest.raises(ConfigError, match="8 / microBatchSize 2 = 4 micro-batches cannot be shared equally by 3"):
        list(loader_for(tmp_path, data).micro_batches(0, 0, 3))


def test_epochs_round_up_once(tmp_path: Path) -> None:
    loader = loader_for(tmp_path, {"sources": [text_source(tmp_path, documents=3)]}, sequence_length=1024)
    assert loader.corpus.num_sequences == 1
    assert loader.steps_in(epochs=1) == 1
    assert loader.steps_in(epochs=17) == 3


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"data source a: .* holds no document"):
        loader_for(tmp_path, {"sources": [{"name": "a", "path": str(tmp_path)}]})


def test_a_bad_line_leaves_no_shard_behind(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": 1}')
    for _ in range(2):
        with pytest.raises(DataError, match=r"a\.jsonl:2: "):
            loader_for(tmp_path, {"sources": [{"name": "a", "path": str(tmp_path / "a.jsonl")}]})
    assert list((tmp_path / "work" / "tokens").glob("*/")) == []


def test_a_fraction_that_leaves_nothing_to_train_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("only one")
    data = {"sources": [{"name": "a", "path": str(tmp_path / "a.txt")}], "validation": {"fraction": 0.1}}
    with pytest.raises(DataError, match="holds out all of its 1 documents"):
        loader_for(tmp_path, data)


def test_conversations_without_a_reachable_answer_are_refused(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "q" * 50}, {"role": "assistant", "content": "a"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    with pytest.raises(DataError, match="the first 32 tokens of every conversation hold no token of the assistant"):
        loader_for(tmp_path, {"sources": [{"name": "a", "path": str(tmp_path / "a.jsonl")}]})


def test_a_vocabulary_larger_than_the_models_is_refused(tmp_path: Path) -> None:
    config = config_for(tmp_path, {"sources": [text_source(tmp_path)]})
    with pytest.raises(DataError, match="the tokenizer has 259 tokens, the model's vocabSize is 100"):
        open_corpus(config, Bytes(), model_vocab_size=100)


def test_a_run_removes_the_half_written_shard_of_one_that_was_killed(tmp_path: Path) -> None:
    aside = tmp_path / "work" / "tokens" / "0a1b.77.part"
    aside.mkdir(parents=True)
    os.utime(aside, (1.0, 1.0))
    loader_for(tmp_path, {"sources": [text_source(tmp_path)]})
    assert not aside.exists()


def test_a_shard_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    data = {"sources": [text_source(tmp_path)]}
    loader_for(tmp_path, data)
    (tokens,) = (tmp_path / "work" / "tokens").rglob("tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(DataError, match="is cut short; delete the folder"):
        loader_for(tmp_path, data)


def test_a_token_outside_the_vocabulary_is_refused_with_its_document(tmp_path: Path) -> None:
    """Damage a shard without changing its sizes."""
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": "de"}')
    data = {"sources": [{"name": "a", "path": str(tmp_path / "a.jsonl")}]}
    sizes = {"global_batch_size": 1, "micro_batch_size": 1, "sequence_length": 8}
    loader_for(tmp_path, data, **sizes)
    (file,) = (tmp_path / "work" / "tokens").glob("*/tokens.bin")
    tokens = np.fromfile(file, dtype=np.uint16)
    tokens[5] = 259  # "e", of the second document: a target first
    tokens.tofile(file)
    loader = loader_for(tmp_path, data, **sizes)
    with pytest.raises(DataError) as refused:
        list(loader.micro_batches(0, 0, 1))
    assert str(refused.value) == (
        f"data source a: document 1 of the tokenised shard {file.parent} holds token 259; "
        "the tokenizer's vocabulary has 259, from 0 on; delete the folder to tokenise again"
    )


def test_a_pad_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    config = config_for(tmp_path, {"sources": [text_source(tmp_path)]})
    loader = Loader(open_corpus(config, Bytes(pad_id=259)), config)
    with pytest.raises(DataError, match=r"the padding token is 259; the tokenizer's vocabulary has 259, from 0 on"):
        [batch for step in range(10) for batch in loader.micro_batches(step, 0, 1)]


def test_the_progress_of_each_source_counts_its_samples(tmp_path: Path) -> None:
    sources = [text_source(tmp_path, "books", weight=3.0), text_source(tmp_path, "news")]
    loader = loader_for(tmp_path, {"sources": sources})
    books, news = loader.progress(step=6)  # of 8 samples each
    assert (books.name, books.samples) == ("books", 36)
    assert (news.name, news.samples) == ("news", 12)
    assert [books.sequences, news.sequences] == [len(source) for source in loader.corpus.sources]


def test_the_progress_of_each_source_does_not_count_batches_that_are_left_out(tmp_path: Path) -> None:
    sources = [text_source(tmp_path, "books", weight=3.0), text_source(tmp_path, "news")]
    loader = loader_for(tmp_path, {"sources": sources}, global_batch_size=2)
    left_out, steps = (3, 0, 6, 90), 5
    trained = [sample for batch in (1, 2, 4, 5, 7) for sample in loader.order.samples(2 * batch, 2 * batch + 2)]
    counts = [sum(sample.source == source for sample in trained) for source in (0, 1)]
    assert [source.samples for source in loader.progress(steps, left_out)] == counts
    assert [source.samples for source in loader.progress(steps)] != counts


@pytest.mark.parametrize("change", ["written", "replaced", "removed"])
def test_a_file_that_changes_behind_its_hash_is_named(tmp_path: Path, change: str) -> None:
    file = tmp_path / "books.jsonl"
    file.write_text("a\nb\n")
    unchanged = UnchangedFiles("books", [LocalFile(file)])

    def documents() -> Iterator[Document]:
        yield Text("a")
        if change == "removed":
            file.unlink()
        else:
            (tmp_path / "new").write_text("a\nb\nc\n")
            (tmp_path / "new").replace(file) if change == "replaced" else file.write_text("a\nb\nc\n")

    wrong = "No such file" if change == "removed" else "was changed while it was read"
    with pytest.raises(DataError, match=rf"data source books: .*books.jsonl.*{wrong}"):
        list(unchanged.documents(documents()))
