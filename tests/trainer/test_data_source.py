"""Reading documents: document boundaries, and errors with file and line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker.trainer.errors import DataError
from stoker.trainer.protocol.config import DataSourceConfig
from stoker.trainer.rank.data.files import list_files
from stoker.trainer.rank.data.source import PIECE_BYTES, Conversation, Document, Text, read_documents


def read(path: Path | str, **fields: Any) -> list[Document]:
    source = DataSourceConfig(name="books", path=str(path), **fields)
    return list(read_documents(source, list_files(source)))


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read(tmp_path / "a.txt") == [Text("one\n\ntwo\n")]


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_and_empty_files(tmp_path: Path) -> None:
    for name, content in {"b.txt": "b", "a/z.py": "z", ".git/x": "no", "empty.txt": "", "a/.hidden": "no"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert read(tmp_path) == [Text("z"), Text("b")]


def test_a_glob_pattern_goes_down(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.py").write_text("x")
    (tmp_path / "a" / "y.txt").write_text("y")
    assert read(f"{tmp_path}/**/*.py") == [Text("x")]


NOT_ROOT = 65534


@contextmanager
def without_rights_of_root() -> Iterator[None]:
    """Let permissions hold: root may read every folder."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(NOT_ROOT)
    try:
        yield
    finally:
        os.seteuid(own)


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "*/*.txt"])
@pytest.mark.parametrize("mode", [0o000, 0o100], ids=["closed", "without its names"])
def test_a_folder_that_may_not_be_read_is_refused_and_not_left_out(pattern: str, mode: int) -> None:
    with tempfile.TemporaryDirectory() as made:
        top = Path(made)
        top.chmod(0o755)
        for name in ("open/a.txt", "closed/b.txt", "lost+found/c.txt"):
            (top / name).parent.mkdir()
            (top / name).write_text(name)
        with without_rights_of_root():
            assert len(read(top / pattern)) == 3
        (top / "lost+found").chmod(0o000)
        with without_rights_of_root():
            assert [document.text for document in read(top / pattern) if isinstance(document, Text)] == [
                "closed/b.txt",
                "open/a.txt",
            ]
        (top / "closed").chmod(mode)
        with without_rights_of_root(), pytest.raises(DataError, match=r"books: .*/closed: Permission denied"):
            read(top / pattern)
        (top / "closed").chmod(0o755)


def test_a_glob_pattern_goes_down_links_and_not_round_in_them(tmp_path: Path) -> None:
    """Two loops are two ways at each turn: 2 to the power of 40 paths before one is too long."""
    for folder in ("corpus/a", "corpus/.b", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.txt").write_text(folder)
    (tmp_path / "corpus" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus" / "a" / "self").symlink_to(".")
    (tmp_path / "corpus" / "a" / "above").symlink_to("..")
    assert read(f"{tmp_path}/corpus/**/*.txt") == [Text("corpus/a"), Text("elsewhere")]


@pytest.mark.parametrize("pattern", ["**", "**/*", "**/**/x.txt", "a/**", "*/x.txt", "[a]/x*", "**/a/x.txt"])
def test_a_glob_pattern_names_each_file_once(tmp_path: Path, pattern: str) -> None:
    for name in ("a/x.txt", ".hidden", "a/.hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(f"{tmp_path}/{pattern}") == [Text("a/x.txt")]


def test_a_folder_whose_name_is_no_pattern_is_gone_through(tmp_path: Path) -> None:
    for folder in ("runs[2]", "runs2"):
        (tmp_path / folder / "a").mkdir(parents=True)
        (tmp_path / folder / "a" / "x.txt").write_text(folder)
    assert read(f"{tmp_path}/runs[2]/*/*.txt") == [Text("runs[2]")]
    assert read(f"{tmp_path}/runs[23]/**/*.txt") == [Text("runs2")]


def test_a_large_file_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    content = ("x" * 99 + "\n\n") * (3 * PIECE_BYTES // 101)
    (tmp_path / "a.txt").write_text(content)
    pieces = read(tmp_path / "a.txt")
    assert all(isinstance(piece, Text) for piece in pieces)
    assert "".join(piece.text for piece in pieces if isinstance(piece, Text)) == content
    assert [piece.ends for piece in pieces if isinstance(piece, Text)] == [False, False, True]


def test_json_lines_hold_texts_or_conversations(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"text": "hello", "url": "x"}\n\n{"text": ""}\n'
        '{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}\n'
    )
    messages = ({"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"})
    assert read(tmp_path / "a.jsonl") == [Text("hello"), Conversation(messages)]


def test_the_format_can_be_said(tmp_path: Path) -> None:
    (tmp_path / "a.data").write_text('{"text": "hello"}')
    assert read(tmp_path / "a.data", format="jsonl") == [Text("hello")]
    assert read(tmp_path / "a.data", format="text") == [Text('{"text": "hello"}')]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('["a"]', "a JSON object is needed, got list"),
        ('{"txt": "a"}', r"exactly one of text and messages is needed, got \['txt'\]"),
        ('{"text": "a", "prompt": "b"}', r"exactly one of text and messages is needed, got \['prompt', 'text'\]"),
        ('{"text": "a", "messages": []}', "exactly one of text and messages"),
        ('{"text": 5}', "text must be a string, got 5"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ('{"messages": []}', "a list with at least one message"),
        ('{"messages": "hi"}', "a list with at least one message, got 'hi'"),
        ('{"messages": ["hi"]}', r"messages\[0\]: exactly the fields role and content are needed, got 'hi'"),
        (
            '{"messages": [{"role": "assistant", "content": "a", "tool_calls": []}]}',
            r"messages\[0\]: exactly the fields role and content",
        ),
        (
            '{"messages": [{"role": "bot", "content": "a"}]}',
            "role 'bot' is unknown; allowed: system, user, assistant, tool",
        ),
        (
            '{"messages": [{"role": "assistant", "content": null}]}',
            r"messages\[0\]: content must be a string, got None",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message has the role assistant"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}:2: ")


def test_bytes_that_are_not_text_are_named_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\nb\xffd")
    with pytest.raises(DataError, match=r"a\.txt: byte 6 is not UTF-8 text"):
        read(tmp_path)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"books: .*none\.txt does not exist; a file, folder or glob pattern is needed"):
        read(tmp_path / "none.txt")
    with pytest.raises(DataError, match="holds no file"):
        read(tmp_path)
    with pytest.raises(DataError, match="holds no file"):
        read(tmp_path / "*.txt")
