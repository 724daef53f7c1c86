"""Parquet, ready-tokenised files and URLs give the same corpus as text, and errors that name file and row."""

from __future__ import annotations

import bz2
import gzip
import http.server
import json
import lzma
import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pytest
from numpy.typing import NDArray
from pyarrow import parquet

from stoker.pod.config_file import ConfigError
from stoker.trainer.errors import DataError, StorageFailed
from stoker.trainer.protocol.config import DataSourceConfig
from stoker.trainer.rank.data import token_file
from stoker.trainer.rank.data.byte_bpe import train_tokenizer
from stoker.trainer.rank.data.corpus import open_corpus
from stoker.trainer.rank.data.files import RemoteFile, list_files
from stoker.trainer.rank.data.loader import Loader
from stoker.trainer.rank.data.read_ahead import read_ahead
from stoker.trainer.rank.data.source import Conversation, Document, Text, Tokens, data_files, read_documents
from stoker.trainer.rank.data.tokens import check_has_text
from tests.trainer.test_data_loader import Bytes, config_for, step_of

TEXTS = [f"document {number} " * (number % 7 + 1) for number in range(40)]
CHAT = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def read(source: DataSourceConfig, end_id: int | None = 256) -> list[Document]:
    return list(read_documents(source, data_files(source, list_files(source)), end_id))


def source_of(path: Path, **fields: Any) -> DataSourceConfig:
    return DataSourceConfig(name="books", path=str(path), **fields)


def write_parquet(path: Path, **columns: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path, row_group_size=7)
    return path


def tokens_of(texts: list[str]) -> NDArray[np.uint16]:
    return np.array([token for text in texts for token in (*text.encode(), 256)], dtype=np.uint16)


def write_bin(path: Path, tokens: NDArray[Any], *, count: int | None = None) -> Path:
    header = np.zeros(256, dtype="<i4")
    header[:3] = (token_file.MAGIC, 1, len(tokens) if count is None else count)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    return path


def compress(path: Path, content: bytes) -> Path:
    """Write a file of two compressed parts, one behind the other, as tools do that compress in parallel."""
    half = len(content) // 2
    path.write_bytes(b"".join(COMPRESS[path.suffix](part) for part in (content[:half], content[half:])))
    return path


def zstd(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def loader_of(tmp_path: Path, name: str, data: dict[str, Any]) -> Loader:
    folder = tmp_path / name
    folder.mkdir()
    config = config_for(folder, {"sources": [{"name": "books", **data}]})
    return Loader(open_corpus(config, Bytes()), config)


def test_every_format_trains_the_same_tokens_in_the_same_order(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    write_parquet(tmp_path / "a.parquet", text=TEXTS, url=["x"] * len(TEXTS))
    np.save(tmp_path / "a.npy", tokens_of(TEXTS))
    write_bin(tmp_path / "a.bin", tokens_of(TEXTS))
    raw = tmp_path / "raw.bin"
    raw.write_bytes(tokens_of(TEXTS).astype("<u4").tobytes())
    Path(f"{raw}.json").write_text(json.dumps({"dtype": "uint32", "eos_token_id": 256}))
    sources: list[dict[str, Any]] = [{"path": str(tmp_path / f"a.{suffix}")} for suffix in ("jsonl", "parquet")]
    sources += [{"path": str(tmp_path / name), "format": "tokens"} for name in ("a.npy", "a.bin", "raw.bin*")]
    sources += [{"url": f"file://{tmp_path}/a.parquet"}, {"url": f"file://{tmp_path}/*.jsonl"}]
    packed = {
        suffix: compress(tmp_path / f"a.jsonl{suffix}", (tmp_path / "a.jsonl").read_bytes()) for suffix in COMPRESS
    }
    sources += [{"path": str(packed[suffix])} for suffix in COMPRESS] + [{"url": f"file://{packed['.zst']}"}]
    loaders = [loader_of(tmp_path, f"run-{number}", data) for number, data in enumerate(sources)]
    wanted = [step_of(loaders[0], step, 2) for step in range(6)]
    for loader in loaders[1:]:
        assert [step_of(loader, step, 2) for step in range(6)] == wanted
    assert len({loader.fingerprint for loader in loaders[:5]}) == 5  # other bytes are another corpus
    assert loaders[5].fingerprint == loaders[1].fingerprint  # a URL to the same bytes is the same corpus
    assert loaders[6].fingerprint == loaders[0].fingerprint


def test_parquet_rows_hold_texts_or_conversations(tmp_path: Path) -> None:
    assert read(source_of(write_parquet(tmp_path / "a.parquet", text=["one", "", "two"]))) == [Text("one"), Text("two")]
    chats = write_parquet(tmp_path / "b.data", messages=[CHAT, CHAT], id=[1, 2])
    assert read(source_of(chats, format="parquet")) == [Conversation(tuple(CHAT))] * 2


BAD_PARQUET: list[tuple[dict[str, Any], str]] = [
    ({"text": ["x"], "messages": [CHAT]}, r"a.parquet: exactly one of the columns text and messages is needed, got"),
    ({"body": ["x"]}, r"a.parquet: exactly one of the columns text and messages is needed, got \['body'\]"),
    ({"text": ["x", None]}, r"a.parquet: row 2: text must be a string, got None"),
    ({"text": [1]}, r"a.parquet: row 1: text must be a string, got 1"),
    ({"messages": [CHAT, CHAT[:1]]}, r"a.parquet: row 2: no message has the role assistant"),
]


@pytest.mark.parametrize(("columns", "message"), BAD_PARQUET)
def test_bad_rows_are_named(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(source_of(write_parquet(tmp_path / "a.parquet", **columns)))


def test_a_file_that_is_no_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("text")
    with pytest.raises(DataError, match=r"a.parquet: not a readable Parquet file"):
        read(source_of(tmp_path / "a.parquet"))


@pytest.mark.parametrize("form", ["path", "url"])
def test_bytes_of_a_parquet_file_that_are_no_text_are_named_by_row(tmp_path: Path, form: str) -> None:
    lengths, content = np.array([0, 2, 4], dtype="<i4"), b"ab\xff\xfe"
    text = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, *map(pyarrow.py_buffer, (lengths, content))])
    file = write_parquet(tmp_path / "a.parquet", text=text)
    source = DataSourceConfig(name="books", url=f"file://{file}") if form == "url" else source_of(file)
    with pytest.raises(DataError, match=r"a.parquet: row 2: not UTF-8 text \(invalid start byte\)"):
        read(source)


@pytest.mark.parametrize("form", ["path", "url"])
def test_a_damaged_page_of_a_parquet_file_is_no_error_of_the_network(tmp_path: Path, form: str) -> None:
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS}), file, compression="none", use_dictionary=False)
    content = bytearray(file.read_bytes())
    content[4:20] = b"\xff" * 16
    file.write_bytes(content)
    source = DataSourceConfig(name="books", url=f"file://{file}") if form == "url" else source_of(file)
    with pytest.raises(DataError, match=r"a.parquet: not a readable Parquet file \(.*thrift"):
        read(source)


def test_documents_of_tokens_end_with_the_end_token_wherever_pieces_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.concatenate([tokens_of(["a", "", "bcd", "efghijk"]), np.array([7, 8], dtype=np.uint16)])
    np.save(tmp_path / "a.npy", tokens)
    whole = [
        document.ids.tolist()
        for document in read(source_of(tmp_path / "a.npy", format="tokens"))
        if isinstance(document, Tokens)
    ]
    assert whole == [[97, 256], [256], [98, 99, 100, 256], [*b"efghijk", 256], [7, 8]]
    for size in (1, 2, 3, 5):
        monkeypatch.setattr(token_file, "CHUNK_TOKENS", size)
        cut = read(source_of(tmp_path / "a.npy", format="tokens"))
        assert [document.ids.tolist() for document in cut if isinstance(document, Tokens)] == whole


def test_a_header_is_no_token_where_the_sidecar_names_the_type_too(tmp_path: Path) -> None:
    file = write_bin(tmp_path / "a.bin", tokens_of(["ab", "c"]))
    Path(f"{file}.json").write_text(json.dumps({"dtype": "uint16", "eos_token_id": 256}))
    found = read(source_of(file, format="tokens"))
    assert [document.ids.tolist() for document in found if isinstance(document, Tokens)] == [[97, 98, 256], [99, 256]]


def test_files_of_tokens_of_other_forms_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "floats.npy", np.zeros(3))
    np.save(tmp_path / "square.npy", np.zeros((2, 2), dtype=np.uint16))
    (tmp_path / "short.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "raw.bin").write_bytes(b"\1\0\2\0")
    write_bin(tmp_path / "cut.bin", tokens_of(["abc"]), count=9)
    (tmp_path / "odd.bin").write_bytes(b"\1\0\2")
    (tmp_path / "odd.bin.json").write_text('{"dtype": "uint16"}')
    write_bin(tmp_path / "other.bin", tokens_of(["abc"]))
    (tmp_path / "other.bin.json").write_text('{"dtype": "uint32"}')
    (tmp_path / "facts.bin").write_bytes(b"\1\0")
    (tmp_path / "facts.bin.json").write_text('{"dtype": "int8"}')
    (tmp_path / "deep.bin").write_bytes(b"\1\0")
    (tmp_path / "deep.bin.json").write_text('{"dtype":' * 10_000)
    np.save(tmp_path / "endless.npy", tokens_of(["abc"]))
    (tmp_path / "endless.npy.json").write_text('{"eos_token_id": 65536}')
    (tmp_path / "a.txt").write_text("text")
    for name, message in [
        ("floats.npy", r"one dimension of uint16 or uint32 is needed, got float64 \[3\]"),
        ("square.npy", r"one dimension of uint16 or uint32 is needed, got uint16 \[2, 2\]"),
        ("short.npy", "not a .npy file"),
        ("raw.bin", "it has no header of token files, and .*raw.bin.json with its dtype is missing"),
        ("cut.bin", "its header counts 9 tokens, the file holds 4"),
        ("odd.bin", "ends within a token of 2 bytes"),
        ("other.bin", "its header says uint16, .*other.bin.json has dtype uint32; leave that out"),
        ("facts.bin", "dtype 'int8' is unknown; allowed: uint16, uint32"),
        ("deep.bin", r"deep.bin.json: not JSON \(maximum recursion"),
        ("endless.npy", r"never end: the end token 65536 is none of uint16, 0 to 65535; write the tokens as uint32"),
        ("a.txt", "a.txt is no file of tokens; allowed: .npy, .bin"),
    ]:
        with pytest.raises(DataError, match=message):
            read(source_of(tmp_path / name, format="tokens"))
    np.save(tmp_path / "ok.npy", tokens_of(["abc"]))
    with pytest.raises(DataError, match=r"the tokenizer has no end token: .*ok.npy.json must give eos_token_id"):
        read(source_of(tmp_path / "ok.npy", format="tokens"), end_id=None)
    with pytest.raises(
        DataError, match=r"ok.npy: its documents would never end: the end token 128001 is none of uint16"
    ):
        read(source_of(tmp_path / "ok.npy", format="tokens"), end_id=128_001)


def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 256, 1, 300, 256], dtype=np.uint16))
    data = {"sources": [{"name": "books", "path": str(tmp_path), "format": "tokens"}]}
    message = f"{tmp_path}/a.npy: document 2 holds token 300, the tokenizer's vocabulary ends at 259"
    with pytest.raises(DataError, match=re.escape(message)):
        open_corpus(config_for(tmp_path, data), Bytes())


def test_a_part_without_a_token_to_predict_is_told_from_conversations(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 256, 256, 256], dtype=np.uint16))
    sources = [{"name": "books", "path": str(tmp_path / "a.npy"), "format": "tokens"}]
    data = {"sources": sources, "validation": {"fraction": 0.7}}
    message = "data source books: none of 2 documents of 3 (data.validation.fraction decides which) has the two tokens"
    with pytest.raises(DataError, match=re.escape(message)):
        open_corpus(config_for(tmp_path, data), Bytes())


def test_no_tokenizer_is_trained_on_tokens(tmp_path: Path) -> None:
    config = config_for(tmp_path, {"sources": [{"name": "books", "path": "/x", "format": "tokens"}]})
    with pytest.raises(
        ConfigError, match=r"data.sources books: format tokens needs the tokenizer that made the tokens"
    ):
        check_has_text(config)


def test_a_changed_sidecar_is_another_corpus(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", tokens_of(["abc", "defg"] * 20))
    data = {"path": str(tmp_path / "a.npy"), "format": "tokens"}
    before = loader_of(tmp_path, "before", data).fingerprint
    (tmp_path / "a.npy.json").write_text('{"eos_token_id": 97}')
    assert loader_of(tmp_path, "after", data).fingerprint != before


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/corpus", recursive=True)


def test_urls_name_files_folders_and_patterns(memory: Any) -> None:
    for name, text in {"b.txt": "b", "a/z.txt": "z", ".git/x": "no", "a/y.jsonl": '{"text": "y"}'}.items():
        memory.pipe(f"/corpus/{name}", text.encode())

    def texts(url: str) -> list[Document]:
        return read(DataSourceConfig(name="books", url=url))

    assert texts("memory://corpus/b.txt") == [Text("b")]
    assert texts("memory://corpus") == [Text("y"), Text("z"), Text("b")]
    assert texts("memory://corpus/**/*.txt") == [Text("z"), Text("b")]
    with pytest.raises(DataError, match=r"memory://corpus/none.txt does not exist"):
        texts("memory://corpus/none.txt")
    with pytest.raises(DataError, match=r"memory://corpus/\*.md holds no file"):
        texts("memory://corpus/*.md")


def test_a_changed_remote_file_is_another_corpus(memory: Any, tmp_path: Path) -> None:
    memory.pipe("/corpus/a.txt", b"one text " * 50)
    before = loader_of(tmp_path, "before", {"url": "memory://corpus/a.txt"})
    memory.pipe("/corpus/a.txt", b"two text " * 50)
    folder = tmp_path / "before"
    config = config_for(folder, {"sources": [{"name": "books", "url": "memory://corpus/a.txt"}]})
    after = Loader(open_corpus(config, Bytes()), config)  # the same cache
    with pytest.raises(DataError, match=r"checkpoint at step 3: data\.sources books has other contents"):
        after.check(before.cursor(3))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its signature
        """Print nothing."""


def test_a_web_server_gives_the_corpus_and_its_absence_is_named(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    handler = partial(Quiet, directory=str(tmp_path / "files"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            remote = loader_of(tmp_path, "remote", {"url": f"{url}/a.jsonl"})
            with pytest.raises(DataError, match=r"none.jsonl does not exist"):
                list_files(DataSourceConfig(name="books", url=f"{url}/none.jsonl"))
        finally:
            server.shutdown()
            thread.join()
    local = loader_of(tmp_path, "local", {"path": str(tmp_path / "files" / "a.jsonl")})
    assert remote.fingerprint == local.fingerprint
    assert step_of(remote, 2, 1) == step_of(local, 2, 1)
    gone = {"name": "books", "url": f"{url}/a.jsonl"}
    tokenizer = {"kind": "train", "vocab_size": 300}
    with pytest.raises(StorageFailed, match=f"data source books: {url}/a.jsonl: ClientConnectorError: Cannot connect"):
        train_tokenizer(config_for(tmp_path, {"sources": [gone], "tokenizer": tokenizer}))  # it holds the cache's lock


class WithoutLength(http.server.BaseHTTPRequestHandler):
    """Sends what it was given in a chunk, as servers do that compress or compute their answers."""

    protocol_version = "HTTP/1.1"
    content = b""

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(self.content), self.content))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its signature
        """Print nothing."""


def test_answers_of_a_web_server_without_a_length_are_read(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)
    rows = write_parquet(tmp_path / "a.parquet", text=TEXTS).read_bytes()
    for name, content in {"a.jsonl": lines, "a.jsonl.gz": gzip.compress(lines), "a.parquet": rows}.items():
        handler = type("Handler", (WithoutLength,), {"content": content})
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            source = DataSourceConfig(name="books", url=f"http://127.0.0.1:{server.server_port}/{name}")
            try:
                if name == "a.parquet":
                    with pytest.raises(DataError, match=r"a.parquet: the server gives no length and no parts"):
                        read(source)
                else:
                    assert read(source) == [Text(text) for text in TEXTS]
            finally:
                server.shutdown()
                thread.join()


class Broken:
    """A file system whose reads fail as a network does."""

    def unstrip_protocol(self, path: str) -> str:
        return f"far://{path}"

    def open(self, path: str, mode: str) -> Any:
        raise ConnectionResetError("the connection was lost")


def test_a_lost_connection_is_an_error_of_storage_with_its_place() -> None:
    files: list[Any] = [RemoteFile(Broken(), "corpus/a.txt", {"size": 3})]
    with pytest.raises(
        StorageFailed, match=r"data source books: far://corpus/a.txt: ConnectionResetError: the connection"
    ):
        list(read_documents(DataSourceConfig(name="books", url="far://corpus/a.txt"), files))


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("fsspec.core", {"url": "memory://corpus"}, r"needs fsspec: install stoker\[remote\]"),
        ("s3fs", {"url": "s3://bucket/corpus"}, r"install stoker\[s3\]"),
        ("pyarrow", {"path": "a.parquet"}, r"a.parquet: format parquet needs pyarrow: install stoker\[parquet\]"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    module: str, source: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_text("")
    with pytest.raises(ConfigError, match=message):
        read(DataSourceConfig(name="books", **source))


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="url floppy://a: Protocol not known: floppy; allowed: s3://"):
        list_files(DataSourceConfig(name="books", url="floppy://a"))


def test_reading_ahead_keeps_order_and_errors() -> None:
    def numbers() -> Iterator[int]:
        yield from range(100)
        raise DataError("at 100")

    found: list[int] = []
    with pytest.raises(DataError, match="at 100"):
        found.extend(read_ahead(numbers()))
    assert found == list(range(100))
    before = threading.active_count()
    ahead = read_ahead(iter(range(1000)))
    assert next(ahead) == 0
    ahead.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text_is_read_as_a_stream_and_damage_is_named(tmp_path: Path, suffix: str) -> None:
    content = "".join(f"line {number * 7919 % 10007}\n" for number in range(100_000)).encode()
    path = compress(tmp_path / f"a.txt{suffix}", content)
    pieces = [document for document in read(source_of(path)) if isinstance(document, Text)]
    assert "".join(piece.text for piece in pieces).encode() == content
    assert len(pieces) > 1
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"data source books: .*a\.txt\{suffix}: "):
        read(source_of(path))
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"data source books: .*a\.txt\{suffix}: "):
        read(source_of(path))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_damaged_compressed_files_behind_a_url_are_no_error_of_the_network(memory: Any, suffix: str) -> None:
    memory.pipe(f"/corpus/a.txt{suffix}", b"no compressed data")
    with pytest.raises(DataError, match=rf"a\.txt\{suffix}: not whole \{suffix} data"):
        read(DataSourceConfig(name="books", url=f"memory://corpus/a.txt{suffix}"))


class Resetting(Broken):
    """Its connections are lost while a file is read."""

    def open(self, path: str, mode: str) -> Any:
        def read(_size: int) -> bytes:
            raise ConnectionResetError("the connection was lost")

        return SimpleNamespace(read=read, close=lambda: None)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_connection_that_is_lost_within_a_compressed_file_is_an_error_of_storage(suffix: str) -> None:
    files: list[Any] = [RemoteFile(Resetting(), f"corpus/a.txt{suffix}", {"size": 3})]
    with pytest.raises(StorageFailed, match=rf"far://corpus/a\.txt\{suffix}: ConnectionResetError: the connection"):
        list(read_documents(DataSourceConfig(name="books", url=f"far://corpus/a.txt{suffix}"), files))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("a.parquet.gz", {}, "parquet in a .gz file; only text and JSONL may be compressed"),
        ("a.gz", {"format": "parquet"}, "parquet in a .gz file"),
        ("a.npy.zst", {"format": "tokens"}, "is no file of tokens; allowed: .npy, .bin"),
    ],
)
def test_other_formats_are_not_compressed_again(
    tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    (tmp_path / name).write_bytes(b"any")
    with pytest.raises(DataError, match=message):
        read(source_of(tmp_path / name, **fields))
