"""Metadata of a GGUF file: the model's configuration, the tensors' Hugging Face names, and access to each tensor.

Read-only after `GgufFile` is made. Does not import torch, because the engine's front opens a tokenizer through it.
Called by `gguf_tokenizer` and `gguf_weights`; the file's header is parsed by `gguf_header`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from stoker.model.config import ModelConfig
from stoker.model.rope_scaling import Llama3Scaling
from stoker.model.weights.gguf_header import HeadError, read_head

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NEUTRAL: dict[str, tuple[float, ...]] = {
    "rope.scaling.factor": (0, 1),
    "rope.scale_linear": (0, 1),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "expert_count": (0,),
}
"""Features that are not built, and the values that mean nothing."""
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of the rotary frequencies' divisors: a GGUF file expresses Llama 3 scaling by them."""


class GgufError(ValueError):
    """The file is damaged, or holds what this build cannot compute."""


class GgufFile:
    """An open file; tensors stay mapped and are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self.values, self.tensors = read_head(self.path)
        except (HeadError, UnicodeDecodeError) as error:
            raise GgufError(f"{path}: not a valid GGUF file: {error}") from error
        self.architecture = str(self.get("general.architecture", ""))
        if self.architecture not in ("llama", "qwen3"):
            raise GgufError(
                f"{path}: not supported yet: general.architecture {self.architecture!r}; allowed: llama, qwen3"
            )
        if (parts := self.get("split.count", 1)) not in (0, 1):
            hint = "join the parts to one file, by llama-gguf-split --merge"
            raise GgufError(f"{path}: not supported yet: split.count {reprlib.repr(parts)}; {hint}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value, or `default`."""
        return self.values.get(key, default)

    def need(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise GgufError(f"{self.path}: {key} is missing")
        return value

    def dimension(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture's own section."""
        name = f"{self.architecture}.{key}"
        return self.need(name) if default is None else self.get(name, default)

    def size(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0 of the architecture's own section."""
        value = self.dimension(key, default)
        if type(value) is not int or value < 1:
            allowed = f"must be a whole number above 0, got {reprlib.repr(value)}"
            raise GgufError(f"{self.path}: {self.architecture}.{key} {allowed}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0 of the architecture's own section, as float32 has it."""
        value = self.dimension(key, default)
        if type(value) not in (int, float) or not 0 < (found := shortest(value)) < math.inf:
            allowed = f"must be a finite number above 0, got {reprlib.repr(value)}"
            raise GgufError(f"{self.path}: {self.architecture}.{key} {allowed}")
        return found

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token, such as `eos`; None where the file names none."""
        key = f"tokenizer.ggml.{name}_token_id"
        if (value := self.get(key)) is None:
            return None
        most = len(self.need("tokenizer.ggml.tokens")) - 1
        if type(value) is not int or not 0 <= value <= most:
            raise GgufError(f"{self.path}: {key} must be a token id from 0 to {most}, got {reprlib.repr(value)}")
        return value

    def names(self) -> dict[str, str]:
        """Return Hugging Face name -> GGUF name of every weight."""
        return {hugging_face_name(name): name for name in self.tensors if name != ROPE_FACTORS}

    def config(self) -> ModelConfig:
        """Return the configuration that the metadata describes."""
        with self.checked():
            return self.read_config()

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Raise GgufError for metadata of another kind than its key needs, such as a text for a number."""
        try:
            yield
        except GgufError:
            raise
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise GgufError(f"{self.path}: not a valid GGUF file: {error}") from error

    def read_config(self) -> ModelConfig:
        if (kind := self.dimension("rope.scaling.type", "none")) != "none":
            raise GgufError(f"{self.path}: not supported yet: rope.scaling.type {kind!r}")
        for key, neutral in NEUTRAL.items():
            if (value := self.dimension(key, neutral[0])) not in neutral:
                raise GgufError(f"{self.path}: not supported yet: {key} {value}")
        num_heads, hidden_size = self.size("attention.head_count"), self.size("embedding_length")
        head_dim = self.size("attention.key_length", hidden_size // num_heads)
        if (value_length := self.size("attention.value_length", head_dim)) != head_dim:
            raise GgufError(f"{self.path}: not supported yet: keys of {head_dim} and values of {value_length} elements")
        if (rotated := self.size("rope.dimension_count", head_dim)) != head_dim:
            raise GgufError(f"{self.path}: not supported yet: rope.dimension_count {rotated} of heads of {head_dim}")
        theta = self.number("rope.freq_base", 10000.0)
        return ModelConfig(
            architecture="qwen3" if self.architecture == "qwen3" else "llama",
            vocab_size=int(self.tensors["token_embd.weight"].shape[1])
            if "token_embd.weight" in self.tensors
            else self.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self.size("feed_forward_length"),
            num_layers=self.size("block_count"),
            num_heads=num_heads,
            num_kv_heads=self.size("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rope_theta=theta,
            rope_scaling=self.rope_scaling(head_dim, theta),
            norm_eps=self.number("attention.layer_norm_rms_epsilon"),
            tie_embeddings="output.weight" not in self.tensors,
            attention_bias="blk.0.attn_q.bias" in self.tensors,
            max_position_embeddings=self.size("context_length"),
            bos_token_id=self.token_id("bos"),
            eos_token_ids=self.eos_ids(),
            pad_token_id=self.token_id("padding"),
        )

    def eos_ids(self) -> tuple[int, ...]:
        """End of text and end of turn, where both are named."""
        ids = [self.token_id("eos"), self.token_id("eot")]
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    def rope_scaling(self, head_dim: int, theta: float) -> Llama3Scaling | None:
        """Return the Llama 3 scaling that gives the file's factors; refuse any other set of factors."""
        if ROPE_FACTORS not in self.tensors:
            return None
        factors = np.array(self.tensors[ROPE_FACTORS].data, dtype=np.float32).reshape(-1)
        if not np.all(np.isfinite(factors) & (factors > 0)):
            raise GgufError(f"{self.path}: {ROPE_FACTORS} must have finite numbers above 0")
        scaling = Llama3Scaling(
            factor=shortest(factors.max()),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        )
        if factors.shape != (head_dim // 2,) or not np.allclose(
            factors, llama3_factors(head_dim, theta, scaling), rtol=1e-4
        ):
            raise GgufError(f"{self.path}: not supported yet: {ROPE_FACTORS} that is not Llama 3's scaling")
        return scaling


def hugging_face_name(name: str) -> str:
    """Return a tensor's Hugging Face name: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`.

    Raises GgufError for a name the model has no place for.
    """
    if name in TENSOR_NAMES:
        return TENSOR_NAMES[name]
    pieces = name.split(".")
    if (
        len(pieces) != 4
        or pieces[0] != "blk"
        or not pieces[1].isdigit()
        or pieces[2] not in BLOCK_NAMES
        or pieces[3] not in ("weight", "bias")
    ):
        raise GgufError(f"not supported yet: tensor {name!r}")
    return f"model.layers.{pieces[1]}.{BLOCK_NAMES[pieces[2]]}.{pieces[3]}"


def llama3_factors(head_dim: int, theta: float, scaling: Llama3Scaling) -> Any:
    """Return the divisor of each pair's frequency."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    original = scaling.original_max_position_embeddings
    share = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = 1 / ((1 - share) / scaling.factor + share)
    slow = np.where(wavelength > original / scaling.low_freq_factor, scaling.factor, blended)
    return np.where(wavelength < original / scaling.high_freq_factor, 1.0, slow)


def shortest(value: Any) -> float:
    """Return a float32 number as the shortest decimal that gives it: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))
