"""Metadata of a GGUF file: the model's configuration, the tensors' Hugging Face names, and access to each tensor.

Read-only after `GgufFile` is made. Does not import torch, because the engine's front opens a tokenizer through it.
Called by `gguf_tokenizer` and `gguf_weights`; the file's header is parsed by `gguf_header`.
"""

from __future__ import annotations

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
        num_heads, hidden_size = int(self.dimension("attention.head_count")), int(self.dimension("embedding_length"))
        head_dim = int(self.dimension("attention.key_length", hidden_size // num_heads))
        if (value_length := int(self.dimension("attention.value_length", head_dim))) != head_dim:
            raise GgufError(f"{self.path}: not supported yet: keys of {head_dim} and values of {value_length} elements")
        if (rotated := int(self.dimension("rope.dimension_count", head_dim))) != head_dim:
            raise GgufError(f"{self.path}: not supported yet: rope.dimension_count {rotated} of heads of {head_dim}")
        theta = shortest(self.dimension("rope.freq_base", 10000.0))
        bos, eos, pad = (self.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding"))
        return ModelConfig(
            architecture="qwen3" if self.architecture == "qwen3" else "llama",
            vocab_size=int(self.tensors["token_embd.weight"].shape[1])
            if "token_embd.weight" in self.tensors
            else int(self.dimension("vocab_size")),
            hidden_size=hidden_size,
            intermediate_size=int(self.dimension("feed_forward_length")),
            num_layers=int(self.dimension("block_count")),
            num_heads=num_heads,
            num_kv_heads=int(self.dimension("attention.head_count_kv", num_heads)),
            head_dim=head_dim,
            rope_theta=theta,
            rope_scaling=self.rope_scaling(head_dim, theta),
            norm_eps=shortest(self.dimension("attention.layer_norm_rms_epsilon")),
            tie_embeddings="output.weight" not in self.tensors,
            attention_bias="blk.0.attn_q.bias" in self.tensors,
            max_position_embeddings=int(self.dimension("context_length")),
            bos_token_id=None if bos is None else int(bos),
            eos_token_ids=self.eos_ids(eos),
            pad_token_id=None if pad is None else int(pad),
        )

    def eos_ids(self, eos: int | None) -> tuple[int, ...]:
        """End of text and end of turn, where both are named."""
        ids = [eos, self.get("tokenizer.ggml.eot_token_id")]
        return tuple(dict.fromkeys(int(token) for token in ids if token is not None))

    def rope_scaling(self, head_dim: int, theta: float) -> Llama3Scaling | None:
        """Return the Llama 3 scaling that gives the file's factors; refuse any other set of factors."""
        if ROPE_FACTORS not in self.tensors:
            return None
        factors = np.array(self.tensors[ROPE_FACTORS].data, dtype=np.float32).reshape(-1)
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
