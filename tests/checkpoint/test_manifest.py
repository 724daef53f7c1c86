"""Manifests as foreign input: every fault is refused before any file is opened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError
from stoker.checkpoint.manifest import Box, FileEntry, Manifest, Piece, TensorInfo, folder_name, parse_folder_name
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.checkpoint.verify import verify
from testing.checkpoint.synthetic import SMALL, make_state, save

Change = Callable[[dict[str, Any]], object]


def sample() -> Manifest:
    tensor = TensorInfo("model.w", (4, 2), "float32")
    piece = Piece("model.w", Box((0, 0), (4, 2)), 0, 8, "float32", "rank-00000.bin", 0, 32, "a" * 64)
    entry = FileEntry("config.json", 2, "b" * 64)
    return Manifest.build(
        step=7, writer="0a1b2c3d", tensors=[tensor], pieces=[piece], files=[entry], meta={"loss": 1.25, "text": "naïve"}
    )


def resealed(raw: dict[str, Any]) -> str:
    """Return the manifest of an attacker: any content, with the matching digest."""
    content = {key: value for key, value in raw.items() if key != "digest"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return json.dumps(content | {"digest": blake3(canonical.encode()).hexdigest()})


def changed(change: Change) -> str:
    raw = json.loads(sample().to_json())
    change(raw)
    return resealed(raw)


def test_a_manifest_survives_its_text() -> None:
    assert Manifest.from_json(sample().to_json()) == sample()
    assert Manifest.from_json(sample().to_json().encode()) == sample()
    assert Manifest.from_json(changed(lambda raw: None)) == sample()


def test_the_digest_does_not_depend_on_the_layout_of_the_text() -> None:
    assert Manifest.from_json(json.dumps(json.loads(sample().to_json()), indent=3)).digest == sample().digest


def test_the_order_in_which_ranks_report_does_not_matter() -> None:
    tensor = TensorInfo("w", (4,), "uint8")
    pieces = [
        Piece("w", Box((rank,), (1,)), 0, 1, "uint8", f"rank-{rank:05d}.bin", 0, 1, "a" * 64) for rank in range(4)
    ]
    forward = Manifest.build(step=1, writer="00000000", tensors=[tensor], pieces=pieces)
    assert Manifest.build(step=1, writer="00000000", tensors=[tensor, tensor], pieces=pieces[::-1]) == forward


def test_a_piece_travels_as_json() -> None:
    piece = sample().pieces[0]
    assert Piece.from_json(json.loads(json.dumps(piece.as_json()))) == piece


def set_piece(**values: Any) -> Change:
    return lambda raw: raw["pieces"][0].update(values)


def set_file(**values: Any) -> Change:
    return lambda raw: raw["files"][0].update(values)


FOREIGN: dict[str, tuple[Change, str]] = {
    "other format": (lambda raw: raw.update(format=2), "format 2 is not supported"),
    "format as text": (lambda raw: raw.update(format="1"), "format '1' is not supported"),
    "unknown key": (lambda raw: raw.update(extra=1), "missing or unknown: ['extra']"),
    "missing key": (lambda raw: raw.pop("meta"), "missing or unknown: ['meta']"),
    "negative step": (lambda raw: raw.update(step=-1), "step -1"),
    "step as bool": (lambda raw: raw.update(step=True), "step True"),
    "step as float": (lambda raw: raw.update(step=7.0), "step 7.0"),
    "writer with separator": (lambda raw: raw.update(writer="../../ab"), "writer '../../ab'"),
    "writer as number": (lambda raw: raw.update(writer=12345678), "writer: text is needed"),
    "tensors as list": (lambda raw: raw.update(tensors=[]), "tensors: an object is needed"),
    "pieces as object": (lambda raw: raw.update(pieces={}), "pieces: a list is needed"),
    "meta as list": (lambda raw: raw.update(meta=[]), "meta: an object is needed"),
    "tensor name with blank": (
        lambda raw: raw["tensors"].update({"a b": {"shape": [], "dtype": "int8"}}),
        "tensor name 'a b'",
    ),
    "negative shape": (lambda raw: raw["tensors"]["model.w"].update(shape=[-4, 2]), "shape (-4, 2)"),
    "huge shape": (lambda raw: raw["tensors"]["model.w"].update(shape=[2**40, 2**40]), "has more than"),
    "too many dims": (lambda raw: raw["tensors"]["model.w"].update(shape=[1] * 17), "at most 16"),
    "unknown dtype": (lambda raw: raw["tensors"]["model.w"].update(dtype="object"), "dtype 'object'"),
    "file above the folder": (set_piece(file="../rank.bin"), "file name '../rank.bin'"),
    "file with absolute path": (set_piece(file="/etc/passwd"), "file name '/etc/passwd'"),
    "file in a subfolder": (set_piece(file="a/b"), "file name 'a/b'"),
    "file with backslash": (set_piece(file="a\\b"), "file name"),
    "hidden file": (set_piece(file=".x"), "file name '.x'"),
    "dot dot": (set_piece(file=".."), "file name '..'"),
    "empty file name": (set_piece(file=""), "file name ''"),
    "file name with NUL": (set_piece(file="a\0b"), "file name"),
    "file name with line feed": (set_piece(file="a\n"), "file name"),
    "the manifest itself": (set_piece(file="manifest.json"), "file name 'manifest.json'"),
    "entry above the folder": (set_file(name="../config.json"), "file name '../config.json'"),
    "entry is a data file": (set_file(name="rank-00000.bin"), "listed twice"),
    "entry with negative size": (set_file(bytes=-1), "bytes must be an integer"),
    "entry with short hash": (set_file(blake3="b" * 63), "64 hex digits"),
    "negative offset": (set_piece(offset=-1), "offset must be an integer"),
    "offset as text": (set_piece(offset="0"), "offset must be an integer"),
    "bytes do not fit": (set_piece(bytes=31), "its elements take 32"),
    "range outside": (set_piece(flat=[0, 9], bytes=36), "flat range"),
    "range backwards": (set_piece(flat=[5, 4]), "flat range"),
    "range as bools": (set_piece(flat=[False, True], bytes=4), "integers are needed"),
    "range of three": (set_piece(flat=[0, 4, 8]), "two integers"),
    "box outside": (set_piece(box={"start": [1, 0], "size": [4, 2]}), "leaves the tensor's shape"),
    "box with other dims": (set_piece(box={"start": [0], "size": [8]}), "leaves the tensor's shape"),
    "box with uneven dims": (set_piece(box={"start": [0], "size": [4, 2]}), "same number of dims"),
    "box negative": (set_piece(box={"start": [-1, 0], "size": [4, 2]}), "must be integers >= 0"),
    "piece of no tensor": (set_piece(tensor="model.v"), "no tensor of that name"),
    "piece with other dtype": (set_piece(dtype="int32"), "the tensor's is float32"),
    "piece hash in capitals": (set_piece(blake3="A" * 64), "64 hex digits"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_an_impossible_manifest_is_refused_with_its_reason(case: str) -> None:
    change, message = FOREIGN[case]
    with pytest.raises(CheckpointCorrupt) as refused:
        Manifest.from_json(changed(change))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("[]", "an object is needed"),
        ("{", "Expecting property name"),
        (sample().to_json()[:-3], "Unterminated"),
        (sample().to_json().replace("1.25", "9" * 5000), "Exceeds the limit"),
        (sample().to_json().replace("naïve", "\\ud800"), "not Unicode"),
        (sample().to_json().replace('"step":7', '"step":8'), "its digest says"),
        (sample().to_json().replace('"step":7', '"step":7,"step":7'), "a key appears twice"),
        (sample().to_json().replace("1.25", "NaN"), "NaN is not a number"),
        (sample().to_json().replace("1.25", "1e999"), "not plain JSON"),
        (b"\xff\xfe", "decode"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_text_that_is_no_manifest_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=message):
        Manifest.from_json(text)


@given(position=st.integers(0, len(sample().to_json().encode()) - 2), bit=st.integers(0, 7))
def test_no_flipped_bit_in_a_manifest_goes_unnoticed(position: int, bit: int) -> None:
    damaged = bytearray(sample().to_json().encode())
    damaged[position] ^= 1 << bit
    with pytest.raises(CheckpointCorrupt):
        Manifest.from_json(bytes(damaged))


def test_meta_must_be_plain_json() -> None:
    for meta in ({"loss": float("nan")}, {"a": object()}, {"a": float("inf")}, {"a": "\ud800"}):
        with pytest.raises(CheckpointError, match=r"not plain JSON|not Unicode"):
            Manifest.build(step=1, writer="00000000", tensors=[], pieces=[], meta=meta)


@pytest.mark.parametrize(
    "name", ["step-1.0a1b2c3d", "step-00000001.0A1B2C3D", "step-00000001", "step-000000001.0a1b2c3d", "x", ""]
)
def test_other_folder_names_are_not_checkpoints(name: str) -> None:
    assert parse_folder_name(name) is None


@pytest.mark.parametrize("step", [0, 1200, 99_999_999, 100_000_000])
def test_folder_names_carry_step_and_writer(step: int) -> None:
    assert parse_folder_name(folder_name(step, "0a1b2c3d")) == (step, "0a1b2c3d")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "link to folder"])
def test_a_data_file_that_is_not_a_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    done = save(CheckpointRoot(tmp_path / "root"), make_state(SMALL))
    data = tmp_path / "root" / done.folder_name / "rank-00000.bin"
    outside = data.rename(tmp_path / "outside")
    if kind == "link":
        data.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(data)
    elif kind == "folder":
        data.mkdir()
    else:
        data.symlink_to(tmp_path)
    with pytest.raises(CheckpointCorrupt, match="is not a regular file"):
        CheckpointReader(data.parent)
    assert any("is not a regular file" in problem for problem in verify(data.parent).problems)


def test_the_format_is_importable_without_torch() -> None:
    modules = ["manifest", "writer", "store", "reader", "cover", "verify", "diff", "export", "facts", "task", "command"]
    code = "import sys\n" + "\n".join(f"import stoker.checkpoint.{module}" for module in modules)
    code += "\nassert 'torch' not in sys.modules and 'safetensors' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
