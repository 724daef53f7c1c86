"""The data loader: the micro-batches of each rank. Every layout trains the same global ones in the same order.

Step s (the first is 0; a run that has finished k steps goes on with step k) trains the samples `s * global_batch_size`
and the following ones. They form `global_batch_size / micro_batch_size` micro-batches, of which each data-parallel rank
takes one contiguous, equal run.

Made by `run_inputs`, read by the loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from stoker.pod.config_file import ConfigError
from stoker.pod.field_names import manifest_name
from stoker.trainer.errors import DataError
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.messages import SourceProgress
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.data.corpus import Corpus, PackedSource
from stoker.trainer.rank.data.differences import differences
from stoker.trainer.rank.data.order import Order, Sample, permute
from stoker.trainer.rank.data.pack import Span
from stoker.trainer.rank.skipped_batches import batch_of_step


class Loader:
    """Reads a corpus in the order of a run. It has no position: every result depends on the arguments alone."""

    def __init__(self, corpus: Corpus, config: TrainerConfig) -> None:
        training = config.training
        if training.global_batch_size % training.micro_batch_size:
            raise ConfigError(
                f"training.globalBatchSize {training.global_batch_size} is not a multiple of "
                f"microBatchSize {training.micro_batch_size}"
            )
        self.corpus = corpus
        self.seed = training.seed
        self.global_batch_size = training.global_batch_size
        self.micro_batch_size = training.micro_batch_size
        self.sequence_length = training.sequence_length
        self.max_validation_sequences = config.data.validation.max_sequences if config.data.validation else 0
        self.order = Order(
            seed=training.seed,
            names=tuple(source.name for source in corpus.sources),
            sizes=tuple(len(source) for source in corpus.sources),
            weights=corpus.weights,
        )

    @property
    def fingerprint(self) -> str:
        return self.corpus.fingerprint

    def steps_in(self, epochs: int) -> int:
        """Steps until `epochs` times as many samples were trained as the corpus has sequences, rounded up once."""
        return -(-epochs * self.corpus.num_sequences // self.global_batch_size)

    def micro_batches(self, step: int, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
        """This rank's part of step `step`, in the order of the global micro-batch index."""
        count = self.global_batch_size // self.micro_batch_size
        if count % dp_size:
            raise ConfigError(
                f"globalBatchSize {self.global_batch_size} / microBatchSize {self.micro_batch_size} = {count} "
                f"micro-batches cannot be shared equally by {dp_size} data-parallel ranks"
            )
        share = self.global_batch_size // dp_size
        first = step * self.global_batch_size + dp_rank * share
        samples = self.order.samples(first, first + share)
        for start in range(0, share, self.micro_batch_size):
            yield self._micro_batch(self.corpus.sources, samples[start : start + self.micro_batch_size])

    def target_tokens(self, step: int) -> int:
        """The number of targets that count in the loss of step `step`, over all ranks."""
        first = step * self.global_batch_size
        samples = self.order.samples(first, first + self.global_batch_size)
        return sum(int(self.corpus.sources[sample.source].targets[sample.sequence]) for sample in samples)

    def progress(self, step: int, left_out: Collection[int] = ()) -> list[SourceProgress]:
        """What `step` steps have trained of each source. `left_out`: batches that no step trains."""
        trained = self._drawn(batch_of_step(step, left_out))
        for batch in left_out:
            if batch < batch_of_step(step, left_out):
                trained -= self._drawn(batch + 1) - self._drawn(batch)
        return [
            SourceProgress(name=source.name, samples=count, sequences=len(source))
            for source, count in zip(self.corpus.sources, trained.tolist(), strict=True)
        ]

    def validation(self, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
        """This rank's part of the validation set.

        Every rank has the same number of micro-batches; the last may be all padding.
        """
        samples = self._validation_samples()
        count = -(-len(samples) // (self.micro_batch_size * dp_size))
        first = dp_rank * count * self.micro_batch_size
        for start in range(first, first + count * self.micro_batch_size, self.micro_batch_size):
            yield self._micro_batch(self.corpus.validation, samples[start : start + self.micro_batch_size])

    def cursor(self, step: int) -> dict[str, Any]:
        """The position after `step` steps, for a checkpoint. These counters are all that a resume needs."""
        return {
            "step": step,
            "samples": step * self.global_batch_size,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "fingerprint": self.fingerprint,
            "corpus": dict(self.corpus.facts),
        }

    def check(self, cursor: Mapping[str, Any]) -> None:
        """Check that a resume at `cursor` continues the same order.

        Raises:
            DataError: the corpus, its packing, the seed or the global batch size are not those of the checkpoint.
        """
        step = cursor.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise DataError(f"the checkpoint's data cursor has no usable step: {dict(cursor)!r}")
        wrong = self._differences(cursor, self.cursor(step))
        if wrong:
            raise DataError(
                f"the data differs from that of the checkpoint at step {step}: {'; '.join(wrong)}; go on with "
                "that data, or begin another job"
            )

    def _differences(self, cursor: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
        """Return what differs from a checkpoint's cursor. One of an earlier version has no facts of its corpus."""
        before = cursor.get("corpus")
        of_corpus: list[str] = []
        if cursor.get("fingerprint") != now["fingerprint"]:
            of_corpus = differences(before, self.corpus.facts) if isinstance(before, dict) else []
            of_corpus = of_corpus or [
                f"fingerprint was {cursor.get('fingerprint')!r}, is {now['fingerprint']!r} (it covers contents, "
                "tokenizer, sequenceLength, packing, weights, held-out fraction)"
            ]
        numbers = ("samples", "global_batch_size", "seed")
        return [
            f"{manifest_name(name)} was {cursor.get(name)!r}, is {now[name]!r}"
            for name in numbers
            if cursor.get(name) != now[name]
        ] + of_corpus

    def _drawn(self, batches: int) -> NDArray[np.int64]:
        """[sources]; the samples of each source in the first `batches` batches."""
        return np.array(self.order.drawn(batches * self.global_batch_size), dtype=np.int64)

    def _validation_samples(self) -> list[Sample]:
        """At most `max_sequences` sequences, chosen from all validation data by a fixed permutation."""
        every = [
            Sample(index, sequence)
            for index, source in enumerate(self.corpus.validation)
            for sequence in range(len(source))
        ]
        chosen = min(self.max_validation_sequences, len(every))
        if not chosen:
            return []
        return [every[index] for index in sorted(permute(np.arange(chosen), len(every), "validation").tolist())]

    def _micro_batch(self, sources: Sequence[PackedSource], samples: Sequence[Sample]) -> MicroBatch:
        page = _Page(self.micro_batch_size * self.sequence_length, self.corpus.pad_id)
        for row in range(self.micro_batch_size):
            if row < len(samples):
                source = sources[samples[row].source]
                for span in source.packing.sequence(samples[row].sequence):
                    page.write(source, span)
            page.pad_to((row + 1) * self.sequence_length)
        if max(page.tokens_T.max(), page.targets_T.max()) >= self.corpus.vocab_size:
            self._refuse(sources, samples)
        return page.micro_batch()

    def _refuse(self, sources: Sequence[PackedSource], samples: Sequence[Sample]) -> NoReturn:
        """Raise DataError for a token outside the vocabulary, which on the device would read and train other memory."""
        allowed = f"the tokenizer's vocabulary has {self.corpus.vocab_size}, from 0 on"
        for sample in samples:
            source = sources[sample.source]
            for span in source.packing.sequence(sample.sequence):
                begin = int(source.shard.offsets[span.document]) + span.start
                largest = int(source.shard.tokens[begin : begin + span.length + 1].max())
                if largest >= self.corpus.vocab_size:
                    raise DataError(
                        f"data source {source.name}: document {span.document} of the tokenised shard "
                        f"{source.shard.folder} holds token {largest}; "
                        f"{allowed}; delete the folder to tokenise again"
                    )
        raise DataError(f"the padding token is {self.corpus.pad_id}; {allowed}")


class _Page:
    """A micro-batch that is being filled from the left."""

    def __init__(self, size: int, pad_id: int) -> None:
        self.tokens_T = np.full(size, pad_id, dtype=np.int64)
        self.positions_T = np.zeros(size, dtype=np.int64)
        self.targets_T = np.zeros(size, dtype=np.int64)
        self.weights_T = np.zeros(size, dtype=np.float32)
        self.starts = [0]

    def write(self, source: PackedSource, span: Span) -> None:
        begin = int(source.shard.offsets[span.document]) + span.start
        end = begin + span.length
        room = self._take(span.length)
        self.tokens_T[room] = source.shard.tokens[begin:end]
        self.targets_T[room] = source.shard.tokens[begin + 1 : end + 1]
        learned = source.shard.learned
        self.weights_T[room] = 1 if learned is None else learned[begin + 1 : end + 1]

    def pad_to(self, end: int) -> None:
        if self.starts[-1] < end:
            self._take(end - self.starts[-1])

    def micro_batch(self) -> MicroBatch:
        cu_seqlens = np.array(self.starts, dtype=np.int32)
        return MicroBatch(
            tokens_T=self.tokens_T,
            positions_T=self.positions_T,
            targets_T=self.targets_T,
            weights_T=self.weights_T,
            cu_seqlens=cu_seqlens,
            max_seqlen=int(np.diff(cu_seqlens).max()),
        )

    def _take(self, length: int) -> slice:
        """The next `length` samples as a document of their own."""
        start = self.starts[-1]
        self.starts.append(start + length)
        room = slice(start, start + length)
        self.positions_T[room] = np.arange(length)
        return room
