"""Bounded time and memory for reading a checkpoint folder, which is foreign input, whatever its manifest holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from stoker.checkpoint import manifest as limits
from stoker.checkpoint.box import Box
from stoker.checkpoint.cover import SearchBudget, cover_problems, tensor_problem
from stoker.checkpoint.entries import MAX_FILE_BYTES
from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError
from stoker.checkpoint.manifest import FileEntry, Manifest, Piece, TensorInfo
from stoker.checkpoint.store import CheckpointRoot

HASH = "0" * 64
EMPTY: dict[str, Any] = {
    "format": 1,
    "step": 1,
    "writer": "00000000",
    "tensors": {},
    "pieces": [],
    "files": [],
    "meta": {},
}


def write(folder: Path, content: dict[str, Any], meta: str = "{}") -> Path:
    """Write a folder whose manifest has this content, with the matching digest. `meta`: canonical JSON."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    canonical = canonical.replace('"meta":{}', f'"meta":{meta}')
    sealed = canonical[:-1] + f',"digest":"{blake3(canonical.encode()).hexdigest()}"}}'
    folder.mkdir()
    (folder / "manifest.json").write_text(sealed)
    return folder


def rows(count: int) -> Iterator[dict[str, Any]]:
    for row in range(count):
        yield {
            "tensor": "optimizer.exp_avg.model.layers.0.mlp.down_proj.weight",
            "box": {"start": [row, 0], "size": [1, 8]},
            "flat": [0, 8],
            "dtype": "uint8",
            "file": "rank-00000.bin",
            "offset": 8 * row,
            "bytes": 8,
            "blake3": HASH,
        }


def with_pieces(count: int) -> dict[str, Any]:
    tensors = {"optimizer.exp_avg.model.layers.0.mlp.down_proj.weight": {"shape": [count, 8], "dtype": "uint8"}}
    return EMPTY | {"pieces": list(rows(count)), "tensors": tensors}


HEAVY_META: dict[str, tuple[Callable[[], str], str]] = {
    "objects": (lambda: in_list("{}", 20_000_000), "objects and lists, .* are allowed"),
    "lists": (lambda: in_list("[]", 20_000_000), "objects and lists, .* are allowed"),
    "numbers": (lambda: in_list("1000", 12_000_000), "values, .* are allowed"),
    "small objects": (lambda: in_list('{"a":{"a":12345678}}', 850_000), "bytes of meta, 16777216 are allowed"),
    "a text": (lambda: f'{{"a":"{"x" * 90_000_000}"}}', "bytes of meta, 16777216 are allowed"),
    "wide characters": (lambda: f'{{"a":"{"x" * 90_000_000}\U0001f600"}}', "bytes of meta, 16777216 are allowed"),
    "depth": (lambda: in_list("[" * 40 + "]" * 40, 1), "meta: nested deeper than 32 levels"),
}
HEAVY: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "tensors": (
        lambda: EMPTY | {"tensors": {f"t{i}": {"shape": [], "dtype": "int8"} for i in range(200_001)}},
        "200001 tensors, 200000 are allowed",
    ),
    "pieces": (lambda: with_pieces(250_001), "250001 items, 250000 are allowed"),
    "files": (
        lambda: EMPTY | {"files": [{"name": f"f{i}", "bytes": 0, "blake3": HASH} for i in range(65)]},
        "files: 65 items, 64 are allowed",
    ),
    "a file of 20 GB": (
        lambda: EMPTY | {"files": [{"name": "config.json", "bytes": 20 * 10**9, "blake3": HASH}]},
        f"bytes must be an integer from 0 to {MAX_FILE_BYTES}",
    ),
}


def in_list(item: str, count: int) -> str:
    return '{"a":[' + ",".join([item] * count) + "]}"


@pytest.mark.parametrize("case", HEAVY_META)
def test_a_heavy_meta_is_refused_in_bounded_memory_and_time(case: str, tmp_path: Path) -> None:
    make, message = HEAVY_META[case]
    assert_refused(write(tmp_path / "heavy", EMPTY, make()), message)


@pytest.mark.parametrize("case", HEAVY)
def test_a_heavy_manifest_is_refused_in_bounded_memory_and_time(case: str, tmp_path: Path) -> None:
    make, message = HEAVY[case]
    assert_refused(write(tmp_path / "heavy", make()), message)


def assert_refused(folder: Path, message: str) -> None:
    found = verified_apart(folder)
    assert not found["ok"]
    assert len(found["problems"]) == 1
    assert re.search(message, found["problems"][0])
    assert found["mib"] < 1200
    assert found["cpu_s"] < 30


def test_many_pieces_are_read_in_bounded_memory_and_time(tmp_path: Path) -> None:
    found = verified_apart(write(tmp_path / "many", with_pieces(100_000)))
    assert found["problems"] == [f"{tmp_path}/many/rank-00000.bin is missing"]
    assert found["mib"] < 600
    assert found["cpu_s"] < 30


def gappy(tensors: int, pieces: int) -> Manifest:
    """Return a manifest whose pieces cover every second row."""
    infos = [TensorInfo(f"t{index}", (2 * pieces, 4), "uint8") for index in range(tensors)]
    return Manifest.build(
        step=1,
        writer="00000000",
        tensors=infos,
        pieces=[
            Piece(info.name, Box((2 * row, 0), (1, 4)), 0, 4, "uint8", f"r{index}.bin", 4 * row, 4, HASH)
            for index, info in enumerate(infos)
            for row in range(pieces)
        ],
    )


def test_gaps_in_many_tensors_cost_no_more_than_one_pass() -> None:
    """Without the bound one tensor of 1,990 pieces took 16.8 s."""
    manifest = gappy(tensors=10, pieces=1990)
    began = time.process_time()
    problems = cover_problems(manifest)
    assert len(problems) == 10
    assert all("no piece holds [" in problem for problem in problems)
    assert time.process_time() - began < 15


def test_the_search_for_faults_has_one_budget_for_all_tensors() -> None:
    tensor = TensorInfo("w", (2000, 4), "uint8")
    pieces = [Piece("w", Box((2 * row, 0), (1, 4)), 0, 4, "uint8", "r", 4 * row, 4, HASH) for row in range(1000)]
    budget = SearchBudget(3000)
    messages = [tensor_problem(tensor, pieces, budget) or "" for _ in range(3)]
    assert "no piece holds" in messages[0]
    assert "with a gap or an overlap" in messages[2]


def test_boxes_that_all_meet_in_one_place_do_not_stop_the_search() -> None:
    """Each piece lies around the middle, in 16 dims, so the search can leave out no half."""
    shape = (1000,) * 6
    boxes = [Box((row,) * 6, (1000 - 2 * row,) * 6) for row in range(400)]
    pieces = [Piece("w", box, 0, 1, "uint8", f"r{index}", 0, 1, HASH) for index, box in enumerate(boxes)]
    began = time.process_time()
    assert "no piece holds" in (tensor_problem(TensorInfo("w", shape, "uint8"), pieces) or "")
    assert time.process_time() - began < 15


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"meta": {"a": "x" * (16 * 2**20)}}, "bytes of meta, 16777216 are allowed"),
        ({"meta": {"a": json.loads("[" * 40 + "]" * 40)}}, "nested deeper than 32 levels"),
        ({"files": [FileEntry(f"f{i}", 0, HASH) for i in range(65)]}, "65 files, 64 are allowed"),
    ],
    ids=["meta", "depth", "files"],
)
def test_what_could_not_be_read_is_not_written(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Manifest.build(step=1, writer="00000000", tensors=[], pieces=[], **parts)


def test_more_pieces_than_can_be_read_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PIECES", 3)
    with pytest.raises(CheckpointError, match="4 pieces, 3 are allowed"):
        gappy(1, 4)


def test_a_manifest_that_could_not_be_read_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = CheckpointRoot(tmp_path)
    staging = root.begin(1, "00000000")
    manifest = Manifest.build(step=1, writer="00000000", tensors=[], pieces=[])
    monkeypatch.setattr(limits, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"bytes, 100 are allowed"):
        root.publish(staging, manifest)
    assert root.scan() == []


def test_the_size_is_looked_at_before_the_text(tmp_path: Path) -> None:
    folder = tmp_path / "sparse"
    folder.mkdir()
    with (folder / "manifest.json").open("wb") as file:
        file.truncate(20 * 10**9)
    found = verified_apart(folder)
    assert re.search("20000000000 bytes, .* are allowed", found["problems"][0])
    assert found["mib"] < 200


def test_a_deep_text_is_refused() -> None:
    with pytest.raises(CheckpointCorrupt, match="recursion"):
        Manifest.from_json(b'{"meta":' + b'{"a":' * 90_000)


def verified_apart(folder: Path) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "testing.checkpoint.run_limited", str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(ran.stdout)
    return found
