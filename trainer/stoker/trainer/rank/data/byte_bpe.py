"""A byte-level BPE tokenizer trained on the corpus, for a run whose model has none.

The result is a folder as Hugging Face's tools write it (`tokenizer.json`, `tokenizer_config.json`), and equal for equal
corpora and sizes.

Called by `tokens`; the result is kept in the token cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from blake3 import blake3
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stoker.trainer.errors import DataError
from stoker.trainer.protocol.config import DataSourceConfig, TrainerConfig
from stoker.trainer.rank.data.cache import aside_of, cache_lock, content_digest, name_folder
from stoker.trainer.rank.data.corpus import cache_folder
from stoker.trainer.rank.data.files import DataFile, list_files, stored_bytes
from stoker.trainer.rank.data.percent import Report, percent_report
from stoker.trainer.rank.data.source import Conversation, Document, Tokens, kind_of, read_documents
from stoker.trainer.rank.data.unchanged_files import UnchangedFiles

FORMAT = 2
"""Part of every name. Change it with what is learned."""
Sources = list[tuple[DataSourceConfig, list[DataFile]]]
END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MAX_CHARACTERS = 256 << 20
"""Limit of the text for training, shared equally by the sources. More costs memory and changes the merges little."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML."""


def train_tokenizer(config: TrainerConfig, report: Report = lambda _: None) -> Path:
    """The folder of the tokenizer for `data.tokenizer.vocab_size` and the sources; trained once per pod.

    Raises:
        DataError: a source is missing, unreadable, or all sources are empty.
    """
    cache, size = cache_folder(config), config.data.tokenizer.vocab_size
    sources = [(source, list_files(source)) for source in config.data.sources]
    with cache_lock(cache, report) as report_to_all:
        unchanged = [UnchangedFiles(source.name, files) for source, files in sources]
        folder = cache / f"bpe-{_name(sources, size, cache, report_to_all)}"
        if not folder.is_dir():
            report_to_all("TrainingTokenizer")
            _write(folder, sources, size, unchanged)
    return folder


def _name(sources: Sources, vocab_size: int, cache: Path, report: Report) -> str:
    """The name of a tokenizer: a digest of all that decides its texts, and of its size."""
    texts = [[_forms(source, files), _contents(source, files, cache, report)] for source, files in sources]
    return blake3(json.dumps([FORMAT, vocab_size, texts]).encode()).hexdigest()[:32]


def _forms(source: DataSourceConfig, files: list[DataFile]) -> list[list[str]]:
    """How each file is read: the same bytes are other texts as lines of JSON than as plain text."""
    return [[kind_of(source, file), file.suffixes.compression] for file in files]


def _contents(source: DataSourceConfig, files: list[DataFile], cache: Path, report: Report) -> str:
    return content_digest(files, cache, percent_report(report, f"Hashing {source.name}", stored_bytes(files)))


def _write(folder: Path, sources: Sources, vocab_size: int, unchanged: Sequence[UnchangedFiles]) -> None:
    seen = _Seen(sources)
    tokenizer = _learn(seen, vocab_size)
    if not seen.characters:
        names = ", ".join(source.name for source, _ in sources)
        raise DataError(f"data sources {names} hold no text to train a tokenizer on")
    for files in unchanged:
        files.check()
    aside = aside_of(folder)
    aside.mkdir()
    (aside / "tokenizer.json").write_text(tokenizer.to_str(pretty=True))  # its own `save` hides errors of the disk
    (aside / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(seen.conversations), indent=1))
    name_folder(aside, folder)


def _learn(texts: _Seen, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, MESSAGE_START, MESSAGE_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    return tokenizer


def _tokenizer_config(conversations: bool) -> dict[str, object]:
    """The tokenizer's configuration.

    Its end-of-sequence token ends a message if there are conversations, else a document.
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": MESSAGE_END if conversations else END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


class _Seen:
    """The texts of all sources; iterating counts their characters and finds out whether there are conversations."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.characters = 0
        self.conversations = False

    def __iter__(self) -> Iterator[str]:
        limit = MAX_CHARACTERS // len(self.sources)
        for source, files in self.sources:
            left = limit
            for document in read_documents(source, files):
                for text in self._texts(document):
                    left -= len(text)
                    self.characters += len(text)
                    yield text
                if left <= 0:
                    break

    def _texts(self, document: Document) -> list[str]:
        assert not isinstance(document, Tokens), "`tokens.open_encoder` refuses to train on tokens"
        if isinstance(document, Conversation):
            self.conversations = True
            return [message["content"] for message in document.messages]
        return [document.text]
