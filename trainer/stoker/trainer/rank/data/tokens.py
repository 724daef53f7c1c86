"""The encoder of a run: its tokenizer, and the encoding of documents.

Made once by `run_inputs`; called while a source is tokenised. No state beyond the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stoker.model.tokenizer import Tokenizer, TokenizerError
from stoker.model.travelling_files import read_travelling_files
from stoker.pod.config_file import ConfigError
from stoker.trainer.errors import DataError
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.data.byte_bpe import train_tokenizer
from stoker.trainer.rank.data.shard import Encoded
from stoker.trainer.rank.data.source import Conversation, Document, Text, Tokens

Report = Callable[[str], None]


def open_encoder(
    config: TrainerConfig, weights_files: Mapping[str, bytes], report: Report = lambda _: None
) -> TokenEncoder:
    """Open the encoder of `data.tokenizer`. `weights_files`: the tokenizer files of the initial weights, if any.

    Raises:
        ConfigError: `path` is missing where it is needed, or given where it is not.
        DataError: the tokenizer cannot be opened, or there is nothing to train one on.
    """
    wanted = config.data.tokenizer
    if (wanted.path is not None) != (wanted.kind == "path"):
        raise ConfigError(
            f"data.tokenizer: path is needed with kind path only, got kind {wanted.kind} and path {wanted.path}"
        )
    try:
        if wanted.path is not None:
            return TokenEncoder(Tokenizer.open(wanted.path))
        if wanted.kind == "auto" and "tokenizer.json" in weights_files:
            return TokenEncoder(Tokenizer(weights_files, name="the starting weights' tokenizer"))
        check_has_text(config)
        folder = train_tokenizer(config, report)
        return TokenEncoder(Tokenizer(read_travelling_files(folder), name=str(folder)))
    except TokenizerError as error:
        raise DataError(f"data.tokenizer: {error}") from error


def check_has_text(config: TrainerConfig) -> None:
    """Check that a tokenizer can be trained on the sources.

    Raises:
        ConfigError: one holds tokens of another tokenizer.
    """
    ready = [source.name for source in config.data.sources if source.format == "tokens"]
    if ready:
        raise ConfigError(
            f"data.sources {', '.join(ready)}: format tokens needs the tokenizer that made the tokens: "
            "data.tokenizer.kind path, or the starting weights'"
        )


@dataclass(frozen=True)
class TokenEncoder:
    """`Encoder` over a tokenizer of the model.

    A text gets what the tokenizer puts around texts, and the end-of-sequence token where it ends.
    """

    tokenizer: Tokenizer

    @property
    def files(self) -> Mapping[str, bytes]:
        """Name -> content, to travel with every checkpoint."""
        return self.tokenizer.files

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        return self.tokenizer.fingerprint

    @property
    def end_id(self) -> int | None:
        """The token that ends a text; None if the tokenizer has none."""
        own = self.tokenizer.special_id("eos_token")
        return own if own is not None else next(iter(self.tokenizer.eos_ids), None)

    @property
    def pad_id(self) -> int:
        """The padding token. Any token will do, because padding is neither attended to nor learned."""
        return next((number for number in (self.tokenizer.pad_id, self.end_id) if number is not None), 0)

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        """Encode documents, in their order.

        Raises:
            DataError: the chat template refuses a conversation; the message names file and line.
        """
        texts = [document for document in documents if isinstance(document, Text)]
        encoded = iter(self._encode_texts(texts))
        assert not any(isinstance(document, Tokens) for document in documents), "they are encoded already"
        return [
            self._encode_conversation(document) if isinstance(document, Conversation) else next(encoded)
            for document in documents
        ]

    def _encode_texts(self, texts: Sequence[Text]) -> list[Encoded]:
        end = self.end_id
        ids = self.tokenizer.encode_many([text.text for text in texts])
        return [Encoded(_ended(tokens, end if text.ends else None)) for text, tokens in zip(texts, ids, strict=True)]

    def _encode_conversation(self, conversation: Conversation) -> Encoded:
        try:
            tokens = self.tokenizer.encode_conversation(conversation.messages)
        except ValueError as error:
            raise DataError(f"{conversation.where}: {error}") from error
        if not any(tokens.mask):
            raise DataError(f"{conversation.where}: the assistant's messages are empty, so there is nothing to learn")
        return Encoded(tokens.ids, tokens.mask)


def _ended(ids: list[int], end: int | None) -> list[int]:
    return ids if end is None or (ids and ids[-1] == end) else [*ids, end]
