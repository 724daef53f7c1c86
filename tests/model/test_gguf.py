"""GGUF files that the tests write with the gguf library, in llama.cpp's own order of rows."""

from __future__ import annotations

import json
import math
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner

from stoker.model.__main__ import main
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.model.rope_scaling import Llama3Scaling
from stoker.model.tokenizer import Tokenizer
from stoker.model.weights.gguf_file import BLOCK_NAMES, TENSOR_NAMES, GgufError, GgufFile, llama3_factors
from stoker.model.weights.gguf_weights import convert
from stoker.model.weights.source import open_weights

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHARACTERS = [*map(chr, range(33, 127)), "Ġ"]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *CHARACTERS, "he", "ll", "Ġw"]
VOCAB_SIZE = len(TOKENS)


def gguf_name(hf_name: str) -> str:
    names = {hf: name for name, hf in TENSOR_NAMES.items()}
    if hf_name in names:
        return names[hf_name]
    _, _, layer, rest = hf_name.split(".", 3)
    module, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{ {hf: name for name, hf in BLOCK_NAMES.items()}[module] }.{suffix}"


def permute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Permute rows into llama.cpp's order: the halves of each head interleaved."""
    return rows.view(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path, decoder: Decoder, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, **changes: Any
) -> None:
    """Write a GGUF file; `changes` replaces metadata of a converter, None leaves it out.

    `blocks` among them: rows of bytes by name, which stand for weights of their `mixed_type`.
    """
    config = decoder.config
    writer = gguf.GGUFWriter(path, config.architecture)
    section: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    for key, value in section.items():
        writer.add_uint32(f"{config.architecture}.{key}", changes.get(key, value))
    numbers = {"rope.freq_base": config.rope_theta, "attention.layer_norm_rms_epsilon": config.norm_eps}
    for key, number in numbers.items():
        writer.add_float32(f"{config.architecture}.{key}", changes.get(key, number))
    if (scaling := changes.get("rope_scaling_type")) is not None:
        writer.add_string(f"{config.architecture}.rope.scaling.type", scaling)
    for key in ("rope.dimension_count", "attention.sliding_window"):
        if key in changes:
            writer.add_uint32(f"{config.architecture}.{key}", changes[key])
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if key in changes:
            writer.add_float32(f"{config.architecture}.{key}", changes[key])
    if "attention.causal" in changes:
        writer.add_bool(f"{config.architecture}.attention.causal", changes["attention.causal"])
    writer.add_add_eos_token(changes.get("add_eos_token", False))
    writer.add_tokenizer_model(changes.get("tokenizer_model", "gpt2"))
    writer.add_tokenizer_pre(changes.get("tokenizer_pre", "smollm"))
    writer.add_token_list(TOKENS[: config.vocab_size])
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (config.vocab_size - 3))
    writer.add_token_merges(["h e", "l l", "Ġ w"])
    writer.add_bos_token_id(changes.get("bos_token_id", 1))
    writer.add_eos_token_id(changes.get("eos_token_id", 2))
    for key in ("tokenizer.ggml.eot_token_id", "split.count"):
        if (value := changes.get(key.rpartition("ggml.")[2])) is not None:
            writer.add_uint32(key, value)
    writer.add_chat_template(TEMPLATE)
    if (factors := changes.get("rope_factors")) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    blocks: Mapping[str, torch.Tensor] = changes.get("blocks", {})
    for part in decoder.named_parts():
        rows = blocks.get(part.hf_name, part.local().float())
        if config.architecture == "llama" and ".q_proj." in part.hf_name:
            rows = permute(rows, config.num_heads)
        if config.architecture == "llama" and ".k_proj." in part.hf_name:
            rows = permute(rows, config.num_kv_heads)
        data, quantised = rows.contiguous().numpy(), kind if rows.dim() > 1 else gguf.GGMLQuantizationType.F32
        if part.hf_name in blocks:
            writer.add_tensor(gguf_name(part.hf_name), data, raw_dtype=mixed_type(part.hf_name))
            continue
        writer.add_tensor(gguf_name(part.hf_name), gguf.quants.quantize(data, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GGUF_FAMILIES = ("llama", "qwen3")


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_a_file_of_another_family_is_refused_by_name(
    name: str, qwen3: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    config = ModelConfig.from_hugging_face(
        with_vocabulary(qwen3).to_hugging_face() | {"model_type": name, "sliding_window": None}
    )
    write_gguf(tmp_path / "model.gguf", make_decoder(config))
    with pytest.raises(GgufError, match=f"general.architecture '{name}'; allowed: llama, qwen3"):
        open_weights(tmp_path / "model.gguf")


def with_vocabulary(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return the same shape with the test's vocabulary, and rows that quantise in blocks of 32."""
    raw = config.to_hugging_face() | {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    return ModelConfig.from_hugging_face(raw | {"bos_token_id": 1, "eos_token_id": 2} | changes)


def test_a_converted_folder_holds_the_weights_and_config_of_the_original(
    config: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    if config.architecture not in GGUF_FAMILIES:
        pytest.skip(f"GGUF files of {config.architecture} are refused")
    plain = with_vocabulary(config, rope_scaling=None)
    decoder = make_decoder(plain)
    write_gguf(tmp_path / "model.gguf", decoder)
    convert(tmp_path / "model.gguf", tmp_path / "out")
    for path in (tmp_path / "out", tmp_path / "model.gguf"):
        source = open_weights(path)
        again = Decoder(source.config, Ops())
        source.load_into(again)
        theirs = {part.hf_name: part.local() for part in again.named_parts()}
        assert all(torch.equal(part.local(), theirs[part.hf_name]) for part in decoder.named_parts())
        assert source.dtype is torch.float32
        assert (
            ModelConfig.from_hugging_face(
                source.config.to_hugging_face() | {"initializer_range": plain.initializer_range}
            )
            == plain
        )


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("F16", torch.float16, 1e-3),
        ("BF16", torch.bfloat16, 1e-2),
        ("Q8_0", torch.float32, 1e-2),
        ("Q4_1", torch.float32, 0.12),
    ],
)
def test_stored_types_are_read(
    kind: str,
    dtype: torch.dtype,
    tolerance: float,
    llama: ModelConfig,
    make_decoder: Callable[..., Decoder],
    tmp_path: Path,
) -> None:
    decoder = make_decoder(with_vocabulary(llama))
    write_gguf(tmp_path / "model.gguf", decoder, gguf.GGMLQuantizationType[kind])
    source = open_weights(tmp_path / "model.gguf")
    again = Decoder(source.config, Ops())
    source.load_into(again)
    assert source.dtype is dtype
    theirs = {part.hf_name: part.local() for part in again.named_parts()}
    for part in decoder.named_parts():
        torch.testing.assert_close(part.local(), theirs[part.hf_name], rtol=0, atol=tolerance)


def mixed_type(hf_name: str) -> gguf.GGMLQuantizationType:
    """The type of a weight in a file of llama.cpp's mix Q4_K_M."""
    is_q6 = any(module in hf_name for module in ("v_proj", "down_proj", "embed_tokens", "lm_head"))
    return gguf.GGMLQuantizationType.Q6_K if is_q6 else gguf.GGMLQuantizationType.Q4_K


def random_blocks(rows: int, kind: gguf.GGMLQuantizationType, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Rows of one block of 256 weights each: any bits, but small scales of the block."""
    blocks = generator.integers(0, 256, (rows, BLOCK_BYTES[kind]), dtype=np.uint8)
    scales = generator.uniform(-1e-3, 1e-3, (rows, 2)).astype(np.float16).view(np.uint8)
    if kind is gguf.GGMLQuantizationType.Q4_K:
        blocks[:, :4] = scales
    else:
        blocks[:, -2:] = scales[:, :2]
    return blocks


def values_of_q4_k(block: npt.NDArray[np.uint8]) -> list[float]:
    """The weights of a block, one after the other, as llama.cpp describes it: w = d * scale * q - dmin * min."""
    d, d_min = map(float, block[:4].view(np.float16))
    packed, quants, values = block[4:16].tolist(), block[16:].tolist(), []
    for part in range(8):
        if part < 4:
            scale, least = packed[part] & 63, packed[part + 4] & 63
        else:
            scale = packed[part + 4] & 15 | packed[part - 4] >> 6 << 4
            least = packed[part + 4] >> 4 | packed[part] >> 6 << 4
        for quant in quants[part // 2 * 32 :][:32]:
            values.append(d * scale * (quant >> 4 if part % 2 else quant & 15) - d_min * least)
    return values


def values_of_q6_k(block: npt.NDArray[np.uint8]) -> list[float]:
    """As `values_of_q4_k`: w = d * scale * (q - 32); four low bits of q are in one place, two high ones in another."""
    low, high, scales = block[:128].tolist(), block[128:192].tolist(), block[192:208].view(np.int8).tolist()
    (d,), values = map(float, block[208:].view(np.float16)), []
    for place in range(256):
        half, quarter, column = place // 128, place % 128 // 32, place % 32
        nibble = low[64 * half + 32 * (quarter % 2) + column] >> 4 * (quarter // 2) & 15
        quant = nibble | (high[32 * half + column] >> 2 * quarter & 3) << 4
        values.append(d * scales[place // 16] * (quant - 32))
    return values


BLOCK_BYTES = {gguf.GGMLQuantizationType.Q4_K: 144, gguf.GGMLQuantizationType.Q6_K: 210}
VALUES_OF = {gguf.GGMLQuantizationType.Q4_K: values_of_q4_k, gguf.GGMLQuantizationType.Q6_K: values_of_q6_k}


@pytest.mark.parametrize("architecture", GGUF_FAMILIES)
def test_a_mix_of_k_quants_is_read(
    architecture: str, request: pytest.FixtureRequest, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    """The gguf library cannot write Q4_K, so the file has blocks of random bits, unpacked here one weight at a time."""
    family = with_vocabulary(request.getfixturevalue(architecture))
    decoder = make_decoder(replace(family, hidden_size=256, intermediate_size=256, num_heads=4, head_dim=64))
    generator, blocks, expected = np.random.default_rng(0), {}, {}
    for part in decoder.named_parts():
        if part.local().dim() > 1:
            kind, (rows, columns) = mixed_type(part.hf_name), part.local().shape
            assert columns == 256
            blocks[part.hf_name] = torch.from_numpy(random_blocks(rows, kind, generator))
            expected[part.hf_name] = torch.tensor([VALUES_OF[kind](row.numpy()) for row in blocks[part.hf_name]])
    write_gguf(tmp_path / "model.gguf", decoder, blocks=blocks)
    source = open_weights(tmp_path / "model.gguf")
    again = Decoder(source.config, Ops())
    source.load_into(again)
    assert source.dtype is torch.float32
    found = {part.hf_name: part.local() for part in again.named_parts()}
    assert {mixed_type(name) for name in expected} == set(BLOCK_BYTES)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7)


def test_llama_3_scaling_is_recognised_by_its_factors(
    llama: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = with_vocabulary(llama, rope_theta=500000.0, rope_scaling=scaling)
    assert isinstance(config.rope_scaling, Llama3Scaling)
    factors = llama3_factors(config.head_dim, config.rope_theta, config.rope_scaling).astype(np.float32)
    decoder = make_decoder(config)
    write_gguf(tmp_path / "model.gguf", decoder, rope_factors=factors)
    assert GgufFile(tmp_path / "model.gguf").config().rope_scaling == config.rope_scaling
    write_gguf(tmp_path / "other.gguf", decoder, rope_factors=factors * 1.1)
    with pytest.raises(GgufError, match="not supported yet: rope_freqs"):
        open_weights(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling_type": "yarn"}, r"not supported yet: rope.scaling.type 'yarn'"),
        ({"attention.value_length": 8}, "keys of 16 and values of 8"),
        ({"rope.dimension_count": 8}, r"not supported yet: rope.dimension_count 8"),
        ({"rope.scaling.factor": 2.0}, r"not supported yet: rope.scaling.factor 2"),
        ({"rope.scale_linear": 4.0}, r"not supported yet: rope.scale_linear 4"),
        ({"attention.sliding_window": 128}, r"not supported yet: attention.sliding_window 128"),
        ({"attention.causal": False}, r"not supported yet: attention.causal False"),
        ({"add_eos_token": True}, r"not supported yet: tokenizer.ggml.add_eos_token True"),
        ({"tokenizer_model": "llama"}, r"not supported yet: tokenizer.ggml.model 'llama'"),
        ({"tokenizer_pre": "tekken"}, r"not supported yet: tokenizer.ggml.pre 'tekken'"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    changes: dict[str, Any], message: str, llama: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", make_decoder(with_vocabulary(llama)), **changes)
    with pytest.raises(GgufError, match=message):
        open_weights(tmp_path / "model.gguf")


def test_settings_that_change_nothing_are_taken(
    llama: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    harmless: dict[str, Any] = {
        "rope.dimension_count": 16,
        "rope.scaling.factor": 1.0,
        "attention.sliding_window": 0,
        "attention.causal": True,
    }
    write_gguf(tmp_path / "model.gguf", make_decoder(with_vocabulary(llama)), **harmless)
    assert open_weights(tmp_path / "model.gguf").config.head_dim == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count": 0}, "llama.attention.head_count must be a whole number above 0, got 0"),
        ({"block_count": 0}, "llama.block_count must be a whole number above 0, got 0"),
        ({"context_length": 0}, "llama.context_length must be a whole number above 0, got 0"),
        (
            {"eos_token_id": 9999},
            f"tokenizer.ggml.eos_token_id must be a token id from 0 to {VOCAB_SIZE - 1}, got 9999",
        ),
        ({"bos_token_id": VOCAB_SIZE}, f"tokenizer.ggml.bos_token_id must be .*, got {VOCAB_SIZE}"),
        ({"eot_token_id": VOCAB_SIZE}, f"tokenizer.ggml.eot_token_id must be .*, got {VOCAB_SIZE}"),
        ({"rope.freq_base": math.nan}, "llama.rope.freq_base must be a finite number above 0, got nan"),
        ({"rope.freq_base": 0.0}, "llama.rope.freq_base must be a finite number above 0, got 0.0"),
        ({"rope.freq_base": math.inf}, "llama.rope.freq_base must be a finite number above 0, got inf"),
        (
            {"attention.layer_norm_rms_epsilon": math.nan},
            "llama.attention.layer_norm_rms_epsilon must be a finite number above 0, got nan",
        ),
        (
            {"attention.layer_norm_rms_epsilon": -1.0},
            "llama.attention.layer_norm_rms_epsilon must be a finite number above 0, got -1.0",
        ),
        ({"rope.scaling.factor": math.nan}, "not supported yet: rope.scaling.factor nan"),
        (
            {"rope_factors": np.array([1, math.nan, 8, 8, 8, 8, 8, 8], dtype=np.float32)},
            "rope_freqs.weight must have finite numbers above 0",
        ),
        ({"split.count": 3}, "split.count 3; join the parts to one file, by llama-gguf-split --merge"),
    ],
    ids=str,
)
def test_wrong_metadata_is_refused_by_its_key(
    changes: dict[str, Any], message: str, llama: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", make_decoder(with_vocabulary(llama)), **changes)
    with pytest.raises(GgufError, match=message):
        open_weights(tmp_path / "model.gguf")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model" * 10)
    with pytest.raises(GgufError, match="not a valid GGUF file"):
        open_weights(tmp_path / "model.gguf")


@pytest.fixture
def file(llama: ModelConfig, make_decoder: Callable[..., Decoder], tmp_path: Path) -> Path:
    write_gguf(tmp_path / "model.gguf", make_decoder(with_vocabulary(llama)))
    return tmp_path / "model.gguf"


def test_the_tokenizer_comes_out_of_the_metadata(file: Path, tmp_path: Path) -> None:
    convert(file, tmp_path / "out")
    for tokenizer in (Tokenizer.open(file), Tokenizer.open(tmp_path / "out")):
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), VOCAB_SIZE)
        text = "hello 12 world"
        pieces = [tokenizer.token_bytes(token).decode() for token in tokenizer.encode(text)]
        assert pieces == ["he", "ll", "o", " ", "1", "2", " w", *"orld"]
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert (
            tokenizer.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True)
            == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )


def test_the_command_converts_and_describes(file: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["convert", str(file), str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert run.exit_code == 0, run.output
    assert "wrote" in run.output
    facts = json.loads(CliRunner().invoke(main, ["info", str(tmp_path / "out"), "--json"]).output)
    assert (facts["kind"], facts["dtype"], facts["config"]["hidden_size"]) == ("huggingFace", "bfloat16", 64)
    assert "chat_template.jinja" in CliRunner().invoke(main, ["info", str(file)]).output


def test_the_command_refuses_with_one_line(file: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["convert", str(file), str(tmp_path)])
    assert (run.exit_code, run.output.splitlines()[-1]) == (
        *(2, f"Error: OUT: {tmp_path} exists already; choose another folder or delete it"),
    )  # click's own code for wrong usage, of which `run_click` makes 64
    (tmp_path / "bad").write_text("x")
    run = CliRunner().invoke(main, ["info", str(tmp_path / "bad")])
    assert run.exit_code == 66
    assert "not a valid GGUF file" in run.output


def test_each_refusal_has_the_code_of_its_cause(file: Path, tmp_path: Path) -> None:
    convert(file, tmp_path / "folder")
    (tmp_path / "folder" / "model.safetensors").unlink()
    (tmp_path / "folder" / "model.safetensors").mkdir()
    (tmp_path / "corrupt").mkdir()
    (tmp_path / "corrupt" / "manifest.json").write_text("{")
    for name, code, message in (
        ("none", 64, "neither a Hugging Face folder (config.json), nor a checkpoint folder"),
        ("folder", 66, "model.safetensors: a file with the weights is needed, this is none"),
        ("corrupt", 67, "corrupt: manifest: "),
    ):
        (tmp_path / name).mkdir(exist_ok=True)
        run = CliRunner().invoke(main, ["info", str(tmp_path / name)])
        assert (run.exit_code, message in run.output) == (code, True), run.output


def test_a_conversion_onto_a_full_disk_names_the_file_and_leaves_nothing(file: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        run = CliRunner().invoke(main, ["convert", str(file), str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run.exit_code == 68, run.output
    assert re.fullmatch(r"Error: .*/\.out\.\d+\.partial/model\.safetensors: cannot be written: .*\n", run.output)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
