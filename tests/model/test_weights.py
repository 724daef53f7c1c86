from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from stoker.checkpoint.box import Box
from stoker.checkpoint.manifest import Manifest, TensorInfo
from stoker.checkpoint.store import CheckpointRoot
from stoker.checkpoint.writer import PieceWriter, write_file
from stoker.model.attend import PackedAttend
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.model.weights.hugging_face import HuggingFaceWeights, load_hugging_face, save_hugging_face
from stoker.model.weights.loading import NoWeights, WeightsError
from stoker.model.weights.source import open_weights

FILES = {
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "generation_config.json": b'{"eos_token_id": [5, 6]}',
}


def weights_of(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {part.hf_name: part.local() for part in decoder.named_parts()}


def assert_same(left: Decoder, right: Decoder) -> None:
    ours, theirs = weights_of(left), weights_of(right)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("shard_bytes", [4 << 30, 20_000], ids=["one file", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_survives_saving_and_loading(
    config: ModelConfig, dtype: torch.dtype, shard_bytes: int, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    decoder = make_decoder(config, dtype=dtype)
    save_hugging_face(tmp_path / "out", decoder, FILES, shard_bytes=shard_bytes)
    source = open_weights(tmp_path / "out")
    again = Decoder(source.config, Ops(), dtype=dtype)
    progress: list[tuple[int, int]] = []
    source.load_into(again, lambda done, total: progress.append((done, total)))
    assert_same(decoder, again)
    assert (source.kind, source.dtype, source.tokenizer_files) == ("huggingFace", dtype, FILES)
    assert source.config.eos_token_ids == (5, 6)
    assert progress[-1] == (config.num_parameters, config.num_parameters)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1 or shard_bytes == 20_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_transformers_reads_the_folder(
    config: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    decoder = make_decoder(config)
    save_hugging_face(tmp_path / "out", decoder, shard_bytes=20_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokens = torch.arange(20)
    attend = PackedAttend(decoder.ops, "auto", torch.tensor([0, 20]))
    with torch.no_grad():
        ours, theirs = decoder.logits(decoder(tokens, tokens, attend)), model(tokens[None]).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_folder_that_transformers_wrote_loads(
    qwen3: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    decoder = make_decoder(qwen3)
    save_hugging_face(tmp_path / "a", decoder)
    AutoModelForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b", max_shard_size="20KB")
    source = open_weights(tmp_path / "b")
    again = Decoder(source.config, Ops())
    load_hugging_face(tmp_path / "b", again)
    assert_same(decoder, again)


def cast_one(name: str, dtype: torch.dtype, tensors: dict[str, torch.Tensor]) -> None:
    tensors[name] = tensors[name].to(dtype)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], decoder: Decoder) -> None:
    tensors = {name: tensor.clone() for name, tensor in weights_of(decoder).items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (
            lambda tensors: tensors.update({"model.norm.bias": torch.zeros(3)}),
            "no place for 1 tensors: model.norm.bias",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight has shape \[3\], the configuration needs \[48\]",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], object],
    message: str,
    llama: ModelConfig,
    make_decoder: Callable[..., Decoder],
    tmp_path: Path,
) -> None:
    decoder = make_decoder(llama)
    save_hugging_face(tmp_path / "out", decoder)
    change_weights(tmp_path / "out", change, decoder)
    with pytest.raises(WeightsError, match=message):
        load_hugging_face(tmp_path / "out", Decoder(llama, Ops()))


def test_a_tied_table_may_be_stored_twice(
    qwen3: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    decoder = make_decoder(qwen3)
    save_hugging_face(tmp_path / "out", decoder)
    table = weights_of(decoder)["model.embed_tokens.weight"].clone()
    change_weights(tmp_path / "out", lambda tensors: tensors.update({"lm_head.weight": table}), decoder)
    again = Decoder(qwen3, Ops())
    load_hugging_face(tmp_path / "out", again)
    assert_same(decoder, again)


@pytest.mark.parametrize("load", ["load_into", "load_direct"])
def test_a_tied_table_that_is_stored_twice_and_differs_is_refused(
    load: str, qwen3: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    decoder = make_decoder(qwen3)
    save_hugging_face(tmp_path / "out", decoder)
    table = weights_of(decoder)["model.embed_tokens.weight"].clone()
    table[-1, -1] += 1
    change_weights(tmp_path / "out", lambda tensors: tensors.update({"lm_head.weight": table}), decoder)
    with pytest.raises(WeightsError, match=r"tie_word_embeddings is set, but lm_head.weight differs from model.embed"):
        getattr(HuggingFaceWeights(tmp_path / "out"), load)(Decoder(qwen3, Ops()))
    change_weights(tmp_path / "out", lambda tensors: tensors.update({"lm_head.weight": table[1:].clone()}), decoder)
    with pytest.raises(WeightsError, match=r"lm_head.weight has shape \[95, 48\]"):
        getattr(HuggingFaceWeights(tmp_path / "out"), load)(Decoder(qwen3, Ops()))


def test_weights_of_a_type_that_needs_scales_are_refused(
    llama: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    """The refusal also holds if the largest tensor is a plain one: integers alone are no weights."""
    name = "model.layers.1.mlp.down_proj.weight"
    decoder = make_decoder(llama)
    save_hugging_face(tmp_path / "out", decoder)
    for dtype, stored in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")):
        change_weights(tmp_path / "out", partial(cast_one, name, dtype), decoder)
        with pytest.raises(WeightsError, match=f"not supported yet: {name} of dtype {stored}"):
            open_weights(tmp_path / "out")


def test_a_tensor_in_two_files_is_refused(
    llama: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    save_hugging_face(folder, make_decoder(llama), shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    save_file({"model.norm.weight": torch.zeros(48)}, folder / "more.safetensors")
    index["weight_map"]["another"] = "more.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"model.norm.weight is in both .*safetensors and .*safetensors"):
        open_weights(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": ["b"]}}], ids=str)
def test_an_index_that_is_none_is_refused_with_the_file(
    index: dict[str, Any], llama: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    save_hugging_face(tmp_path / "out", make_decoder(llama))
    (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"model.safetensors.index.json: "):
        open_weights(tmp_path / "out")


@pytest.mark.parametrize("content", [b"{", b"[]", b"[" * 100_000], ids=["cut", "list", "deep"])
def test_damaged_generation_settings_are_refused_with_the_file(
    content: bytes, llama: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    save_hugging_face(tmp_path / "out", make_decoder(llama), {"generation_config.json": content})
    with pytest.raises(ValueError, match=r"^generation_config.json: "):
        open_weights(tmp_path / "out")


def test_a_damaged_folder_is_refused_with_the_file(
    llama: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    save_hugging_face(folder, make_decoder(llama), shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name, message in (
        ("../secret.safetensors", "is not a plain file name"),
        ("gone.safetensors", "gone.safetensors is missing"),
    ):
        changed = index | {"weight_map": index["weight_map"] | {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(changed))
        with pytest.raises(WeightsError, match=message):
            open_weights(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(WeightsError, match=r"neither model.safetensors nor"):
        open_weights(folder)
    (folder / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(WeightsError, match="not a valid safetensors file"):
        open_weights(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"config.json: cannot be read as JSON"):
        open_weights(folder)


def test_nothing_is_written_over_a_folder(
    llama: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="exists already"):
        save_hugging_face(tmp_path, make_decoder(llama))


def test_a_path_that_holds_no_weights_is_refused(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "neither a Hugging Face folder"), (tmp_path / "none", "does not exist")):
        with pytest.raises(NoWeights, match=message):
            open_weights(path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="a digest was given, but this is no checkpoint folder"):
        open_weights(tmp_path, "0" * 64)


def write_checkpoint(root: Path, decoder: Decoder, files: dict[str, bytes]) -> Any:
    """Write a checkpoint like a trainer's, with one tensor cut in two."""
    store = CheckpointRoot(root)
    staging = store.begin(7, "0123abcd")
    writer, tensors = PieceWriter(staging, "rank-00000.bin"), {}
    for part in decoder.named_parts():
        dtype = str(part.parameter.dtype).removeprefix("torch.")
        info = TensorInfo(f"model.{part.hf_name}", part.global_shape, dtype)
        tensors[info.name] = info
        flat = part.local().flatten()
        bits = flat.view(torch.int16) if flat.dtype is torch.bfloat16 else flat
        half = len(flat) // 2
        for begin, end in ((0, half), (half, len(flat))):
            writer.add(info, Box.whole(info.shape), (begin, end), bits[begin:end].contiguous().numpy())
    pieces = writer.close()
    entries = [write_file(staging, name, data) for name, data in files.items()]
    manifest = Manifest.build(
        step=7, writer="0123abcd", tensors=tensors.values(), pieces=pieces, files=entries, meta={}
    )
    return store.publish(staging, manifest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_folder_is_served_directly(
    config: ModelConfig, dtype: torch.dtype, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    decoder = make_decoder(config, dtype=dtype)
    raw = json.dumps(config.to_hugging_face()).encode()
    published = write_checkpoint(tmp_path, decoder, FILES | {"config.json": raw})
    folder = tmp_path / published.folder_name
    source = open_weights(folder, published.digest)
    again = Decoder(source.config, Ops(), dtype=dtype)
    source.load_into(again)
    assert_same(decoder, again)
    assert (source.kind, source.dtype, dict(source.tokenizer_files)) == ("checkpoint", dtype, FILES)
    with pytest.raises(ValueError, match="digest"):
        open_weights(folder, "0" * 64)


def test_a_checkpoint_with_weights_of_another_type_is_refused_by_name(
    llama: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    decoder = make_decoder(llama)
    decoder.final_norm.weight = torch.nn.Parameter(torch.ones(48, dtype=torch.float64))  # type: ignore[union-attr]
    raw = json.dumps(llama.to_hugging_face()).encode()
    published = write_checkpoint(tmp_path, decoder, {"config.json": raw})
    with pytest.raises(WeightsError, match=r"not supported yet: model.norm.weight of dtype float64"):
        open_weights(tmp_path / published.folder_name)


def test_a_checkpoint_without_its_config_is_refused(
    llama: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    published = write_checkpoint(tmp_path, make_decoder(llama), {})
    with pytest.raises(WeightsError, match=r"carries no config.json"):
        open_weights(tmp_path / published.folder_name)
