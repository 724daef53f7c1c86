"""Any layout loads into any other, bit for bit."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.checkpoint.box import Box, slabs
from stoker.checkpoint.dtype import NUMPY
from stoker.checkpoint.errors import CheckpointError, CheckpointMissing
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.checkpoint.verify import verify
from testing.checkpoint.synthetic import LAYOUTS, SMALL, Shard, State, make_state, part, same_bits, save


def check_reads_into(reader: CheckpointReader, state: State, layout: str, ranks: int) -> None:
    tensors = [tensor for tensor, _ in state.values()]
    for shards in LAYOUTS[layout](tensors, ranks):
        for shard in shards:
            wanted = part(state[shard.tensor.name][1], shard)
            assert same_bits(reader.read(shard.tensor.name, shard.box, shard.flat), wanted), shard


@pytest.mark.parametrize("written", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_any_layout_loads_into_any_other(tmp_path: Path, written: str, ranks: int) -> None:
    state = make_state(SMALL)
    done = save(CheckpointRoot(tmp_path), state, cut=LAYOUTS[written], ranks=ranks, piece_bytes=40)
    assert verify(tmp_path / done.folder_name, done.digest).problems == ()
    reader = CheckpointReader(tmp_path / done.folder_name, done.digest)
    for layout in LAYOUTS:
        for readers in (1, 2, 4):
            check_reads_into(reader, state, layout, readers)
    for name, (_, values) in state.items():
        assert same_bits(reader.read(name), values)


def test_more_ranks_than_elements_leave_empty_ranges_and_no_empty_files(tmp_path: Path) -> None:
    state = make_state({"model.w": ((3,), "float32")})
    done = save(CheckpointRoot(tmp_path), state, cut=LAYOUTS["flat ranges"], ranks=5)
    folder = tmp_path / done.folder_name
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "rank-00000.bin",
        "rank-00001.bin",
        "rank-00002.bin",
    ]
    assert same_bits(CheckpointReader(folder).read("model.w"), state["model.w"][1])


shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
states = st.dictionaries(
    st.sampled_from(["a", "b.weight", "c"]),
    st.tuples(shapes, st.sampled_from(sorted(NUMPY))),
    min_size=1,
    max_size=3,
)


@st.composite
def requests(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[Box, tuple[int, int]]:
    starts = [draw(st.integers(0, extent)) for extent in shape]
    sizes = [draw(st.integers(0, extent - start)) for extent, start in zip(shape, starts, strict=True)]
    box = Box(tuple(starts), tuple(sizes))
    first = draw(st.integers(0, box.volume))
    return box, (first, draw(st.integers(first, box.volume)))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shapes=states, layout=st.sampled_from(sorted(LAYOUTS)), ranks=st.integers(1, 4))
def test_any_box_and_flat_range_reads_what_was_written(
    data: st.DataObject, shapes: dict[str, tuple[tuple[int, ...], str]], layout: str, ranks: int
) -> None:
    state = make_state(shapes)
    with tempfile.TemporaryDirectory() as folder:
        piece_bytes = data.draw(st.integers(1, 80))
        done = save(CheckpointRoot(Path(folder)), state, cut=LAYOUTS[layout], ranks=ranks, piece_bytes=piece_bytes)
        reader = CheckpointReader(Path(folder) / done.folder_name)
        for name, (tensor, values) in state.items():
            box, flat = data.draw(requests(tensor.shape))
            wanted = part(values, Shard(tensor, box, flat))
            assert same_bits(reader.read(name, box, flat), wanted)
            out = bytearray(wanted.nbytes)
            reader.read(name, box, flat, out=memoryview(out))
            assert bytes(out) == wanted.tobytes()


@settings(max_examples=200, deadline=None)
@given(data=st.data(), shape=shapes)
def test_slabs_hold_exactly_the_flat_range_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box, (first, end) = data.draw(requests(shape))
    numbers = np.arange(math.prod(shape)).reshape(shape)
    wanted = numbers[box.slices_in(Box.whole(shape))].reshape(-1)[first:end]
    parts = slabs(box, first, end)
    held = [numbers[slab.slices_in(Box.whole(shape))].reshape(-1) for slab in parts]
    assert np.array_equal(np.concatenate([np.empty(0, numbers.dtype), *held]), wanted)
    assert len(parts) <= max(2 * len(shape) - 1, 1)


def test_out_must_fit_exactly(tmp_path: Path) -> None:
    state = make_state(SMALL)
    done = save(CheckpointRoot(tmp_path), state)
    reader = CheckpointReader(tmp_path / done.folder_name)
    with pytest.raises(CheckpointError, match="out must be writable, contiguous and 28 bytes, got 24"):
        reader.read("model.norm.weight", out=np.empty(6, np.float32))
    with pytest.raises(CheckpointError, match="out must be writable"):
        reader.read("model.norm.weight", out=memoryview(bytes(28)))
    target = np.empty((13, 6), np.float32)
    reader.read("model.embed.weight", out=target)
    assert same_bits(target, state["model.embed.weight"][1])


@pytest.mark.parametrize(
    ("box", "flat", "message"),
    [
        (Box((0, 0), (14, 6)), None, "leaves the shape"),
        (Box((0,), (13,)), None, "leaves the shape"),
        (None, (0, 79), "flat range"),
        (None, (5, 4), "flat range"),
        (None, (-1, 4), "flat range"),
    ],
)
def test_a_read_outside_the_tensor_is_refused(
    tmp_path: Path, box: Box | None, flat: tuple[int, int] | None, message: str
) -> None:
    done = save(CheckpointRoot(tmp_path), make_state(SMALL))
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path / done.folder_name).read("model.embed.weight", box, flat)


def test_an_unknown_tensor_is_missing(tmp_path: Path) -> None:
    done = save(CheckpointRoot(tmp_path), make_state(SMALL))
    with pytest.raises(CheckpointMissing, match=r"no tensor 'model\.nope'"):
        CheckpointReader(tmp_path / done.folder_name).read("model.nope")


def test_only_pieces_that_intersect_are_read(tmp_path: Path) -> None:
    state = make_state({"w": ((16, 4), "float32")})
    done = save(CheckpointRoot(tmp_path), state, piece_bytes=32)
    data = tmp_path / done.folder_name / "rank-00000.bin"
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    reader = CheckpointReader(tmp_path / done.folder_name)
    box = Box((0, 1), (13, 2))
    assert same_bits(reader.read("w", box), np.ascontiguousarray(state["w"][1][:13, 1:3]))
    with pytest.raises(ValueError, match="is damaged"):
        reader.read("w", Box((14, 0), (1, 4)))
