"""Export to a Hugging Face folder, comparison of two checkpoints, conversion of values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize

from stoker.checkpoint.diff import Difference, diff
from stoker.checkpoint.dtype import from_float32, to_float32
from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError, CheckpointExists, CheckpointMissing
from stoker.checkpoint.export import Dtype, export_hugging_face
from stoker.checkpoint.manifest import TensorInfo
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from testing.checkpoint.synthetic import LAYOUTS, State, save

CONFIG = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "torch_dtype": "bfloat16"}


def weights(seed: int = 0) -> State:
    random = np.random.default_rng(seed)
    shapes = {
        "model.model.embed_tokens.weight": (9, 4),
        "model.model.norm.weight": (4,),
        "model.lm_head.weight": (9, 4),
        "optimizer.exp_avg.model.norm.weight": (4,),
    }
    values = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    return {name: (TensorInfo(name, shapes[name], "float32"), value) for name, value in values.items()}


def saved(folder: Path, state: State, config: dict[str, object] | None = None, **options: Any) -> CheckpointReader:
    files = {"config.json": json.dumps(config or CONFIG).encode(), "tokenizer.json": b"{}"}
    done = save(CheckpointRoot(folder), state, files=files, **options)
    return CheckpointReader(folder / done.folder_name)


def loaded(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, fields in deserialize(path.read_bytes()):
            tensors[name] = (fields["dtype"], fields["shape"], bytes(fields["data"]))
    return tensors


@pytest.mark.parametrize("layout", ["whole", "both"])
def test_an_export_holds_the_weights_under_their_own_names(tmp_path: Path, layout: str) -> None:
    state = weights()
    reader = saved(tmp_path / "root", state, cut=LAYOUTS[layout], ranks=3)
    done = export_hugging_face(reader, tmp_path / "out")
    assert done.files == ("config.json", "model.safetensors", "tokenizer.json")
    assert loaded(tmp_path / "out") == {
        name.removeprefix("model."): ("F32", list(tensor.shape), values.tobytes())
        for name, (tensor, values) in state.items()
        if name.startswith("model.")
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG | {"torch_dtype": "float32"}
    assert not (tmp_path / "out.partial").exists()


def test_an_export_that_fails_leaves_nothing_in_the_way_of_the_next_one(tmp_path: Path) -> None:
    reader = saved(tmp_path / "root", weights())
    file = reader.folder / "rank-00000.bin"
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(CheckpointCorrupt, match="is damaged"):
        export_hugging_face(reader, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    file.write_bytes(whole)
    export_hugging_face(reader, tmp_path / "out")


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    reader = saved(tmp_path / "root", weights(), CONFIG | {"tie_word_embeddings": True})
    export_hugging_face(reader, tmp_path / "out")
    assert sorted(loaded(tmp_path / "out")) == ["model.embed_tokens.weight", "model.norm.weight"]


def test_a_large_export_is_sharded_with_an_index(tmp_path: Path) -> None:
    reader = saved(tmp_path / "root", weights())
    done = export_hugging_face(reader, tmp_path / "out", shard_bytes=160)
    assert done.files == (
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 304},
        "weight_map": {
            "lm_head.weight": "model-00001-of-00002.safetensors",
            "model.embed_tokens.weight": "model-00002-of-00002.safetensors",
            "model.norm.weight": "model-00002-of-00002.safetensors",
        },
    }
    assert len(loaded(tmp_path / "out")) == 3


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "BF16"), ("float16", "F16")])
def test_an_export_converts_to_the_wanted_dtype(tmp_path: Path, dtype: Dtype, name: str) -> None:
    state = weights()
    export_hugging_face(saved(tmp_path / "root", state), tmp_path / "out", dtype=dtype)
    expected = from_float32(state["model.lm_head.weight"][1], dtype).tobytes()
    assert loaded(tmp_path / "out")["lm_head.weight"] == (name, [9, 4], expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype


def test_an_export_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    state = weights()
    reader = saved(tmp_path / "root", state)
    (tmp_path / "taken").mkdir()
    with pytest.raises(CheckpointExists, match="taken exists"):
        export_hugging_face(reader, tmp_path / "taken")
    bare = save(CheckpointRoot(tmp_path / "bare"), state)
    with pytest.raises(CheckpointMissing, match=r"no file 'config\.json'"):
        export_hugging_face(CheckpointReader(tmp_path / "bare" / bare.folder_name), tmp_path / "out")
    optimizer = {name: value for name, value in state.items() if name.startswith("optimizer.")}
    with pytest.raises(CheckpointMissing, match="no weights"):
        export_hugging_face(saved(tmp_path / "optimizer", optimizer), tmp_path / "out")
    state["model.lm_head.weight"][1][0, 0] = 1e6
    with pytest.raises(CheckpointError, match=r"tensor model\.lm_head\.weight: a value is too large for float16"):
        export_hugging_face(saved(tmp_path / "large", state), tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_bfloat16_rounds_to_the_nearest_neighbour_and_ties_to_even() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    special = np.array([0, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x7FC00000], np.uint32)
    bits = np.concatenate([bits, bits & 0xFFFF8000, special])
    bits = bits[(bits & 0x7FFFFFFF < 0x7F7F0000) | (bits & 0x7FFFFFFF >= 0x7F800000)]
    values = bits.view(np.float32)
    ours = to_float32(from_float32(values, "bfloat16"), "bfloat16")
    below, above = (bits & 0xFFFF0000).view(np.float32), ((bits & 0xFFFF0000) + np.uint32(0x10000)).view(np.float32)
    with np.errstate(invalid="ignore"):
        to_below, to_above = abs(values.astype(float) - below), abs(above.astype(float) - values)
        even = (bits >> 16) % 2 == 0
        wanted = np.where((to_below < to_above) | ((to_below == to_above) & even), below, above)
    wanted = np.where(np.isfinite(values), wanted, values)
    assert np.array_equal(ours, wanted, equal_nan=True)


def test_a_value_too_large_for_bfloat16_is_refused() -> None:
    with pytest.raises(CheckpointError, match="too large for bfloat16"):
        from_float32(np.array([3.4e38], np.float32), "bfloat16")


def test_checkpoints_of_different_layouts_are_the_same(tmp_path: Path) -> None:
    state = weights()
    first = saved(tmp_path / "a", state, cut=LAYOUTS["dim 1"], ranks=2)
    second = saved(tmp_path / "b", state, cut=LAYOUTS["flat ranges"], ranks=3, step=9)
    assert diff(first, second) == []


def test_differences_are_counted_and_measured(tmp_path: Path) -> None:
    ours, theirs = dict(weights()), dict(weights())
    moved = theirs["model.lm_head.weight"][1].copy()
    moved[0, 0] += 0.5
    moved[3, 1] += 0.25
    theirs["model.lm_head.weight"] = (ours["model.lm_head.weight"][0], moved)
    theirs["model.model.norm.weight"] = (
        TensorInfo("model.model.norm.weight", (2, 2), "float32"),
        np.zeros((2, 2), np.float32),
    )
    del theirs["optimizer.exp_avg.model.norm.weight"]
    first = saved(tmp_path / "a", ours, cut=LAYOUTS["both"], ranks=2)
    second = saved(tmp_path / "b", theirs, CONFIG | {"vocab_size": 9})
    found = diff(first, second)
    assert [(item.name, item.kind, item.elements) for item in found] == [
        ("model.lm_head.weight", "values", 2),
        ("model.model.norm.weight", "shape", 0),
        ("optimizer.exp_avg.model.norm.weight", "only in first", 0),
        ("config.json", "file", 0),
    ]
    assert found[0].max_abs == pytest.approx(0.5, abs=1e-6)
    assert diff(first, second, prefix="model.lm_head.", tolerance=0.6) == []
    assert len(diff(first, second, prefix="model.lm_head.", tolerance=0.4)) == 1


def test_equal_nans_are_equal_and_a_new_nan_is_not(tmp_path: Path) -> None:
    tensor = TensorInfo("model.w", (2,), "float32")
    one = {"model.w": (tensor, np.array([np.nan, 1], np.float32))}
    two = {"model.w": (tensor, np.array([np.nan, np.nan], np.float32))}
    first, second = saved(tmp_path / "a", one), saved(tmp_path / "b", two)
    assert diff(first, first) == []
    (found,) = diff(first, second, tolerance=1e9)
    assert isinstance(found, Difference)
    assert found.max_abs is not None
    assert (found.elements, np.isnan(found.max_abs)) == (1, True)
    assert found.as_json()["max_abs"] is None


def test_a_damaged_side_is_refused_by_diff(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a", weights()), saved(tmp_path / "b", weights())
    data = second.folder / "rank-00000.bin"
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointCorrupt, match="is damaged"):
        diff(first, second)
