"""GPUs by name: memory, rates and links, from their vendors' data sheets, and the part of them that training reaches.

The parts were measured on H200s with the trainer's own kernels (bench/README.md, rows T1 and T4).
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU and its links."""

    name: str
    memory_bytes: float
    """That programs can use."""
    flops: dict[str, float]
    """Precision that the GPU has -> dense operations per second."""
    bandwidth: float
    """Bytes per second of its memory."""
    link: float
    """Bytes per second to another GPU of the node, one direction, as collectives reach it."""
    network: float = 45e9
    """Bytes per second to a GPU of another node, one direction."""
    per_node: int = 8

    def check_precision(self, precision: str) -> None:
        """Raise ValueError where the GPU has no products in this precision."""
        if precision not in self.flops:
            allowed = ", ".join(self.flops)
            raise ValueError(f"memory.precision {precision}: an {self.name} does not compute in it; allowed: {allowed}")


def _flops(bf16: float, fp8: float | None, fp32: float) -> dict[str, float]:
    eight_bits = {} if fp8 is None else {"fp8": fp8}
    return {"bf16": bf16, "fp16": bf16, **eight_bits, "fp32": fp32}


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="A100",
            memory_bytes=79.1 * GIB,
            flops=_flops(312e12, None, 19.5e12),
            bandwidth=2.04e12,
            link=230e9,
            network=22e9,
        ),
        Gpu(name="H100", memory_bytes=79.1 * GIB, flops=_flops(989e12, 1979e12, 67e12), bandwidth=3.35e12, link=350e9),
        Gpu(name="H200", memory_bytes=139.8 * GIB, flops=_flops(989e12, 1979e12, 67e12), bandwidth=4.8e12, link=350e9),
        Gpu(name="B200", memory_bytes=178.0 * GIB, flops=_flops(2250e12, 4500e12, 75e12), bandwidth=7.7e12, link=700e9),
    )
}
PRODUCTS, ATTENTION, COPIES = 0.655, 0.6, 0.85
"""Part of the peak that matrix products, attention of endless sequences and element-wise kernels reach."""
ATTENTION_START = 2000
"""Tokens of a sequence with which attention reaches half of that: 8,192 give 0.48, 65,536 give 0.58."""
OWN_ATTENTION = 0.64
"""Speed of our own attention beside flash-attn-4's: 394 of 617 TFLOP/s, both passes of one document of 8,192 tokens."""
ALL_TO_ALL = 0.72
"""Part of a link's rate that an all-to-all of rows reaches: each rank sends runs of other lengths."""
HIDDEN_COST = 0.5
"""Seconds that one second of communication beside computation costs: it takes multiprocessors and bandwidth."""
RESERVE_BYTES = 4 * GIB
"""Memory for the CUDA context, NCCL, libraries' workspaces and gaps between allocations."""


def gpu_named(name: str) -> Gpu:
    """Return the GPU of a name or of a product name ("NVIDIA H200", "nvidia-h100-80gb-hbm3").

    Raises:
        ValueError: the table has none of that name; the message lists it.
    """
    found = known_gpu(name)
    if found is None:
        raise ValueError(f"gpu {name!r} is unknown; allowed: {', '.join(GPUS)}")
    return found


def known_gpu(name: str) -> Gpu | None:
    """Return the GPU of a name or product name, or None."""
    words = name.upper().replace("-", " ").replace("_", " ").split()
    return next((GPUS[word] for word in words if word in GPUS), None)
