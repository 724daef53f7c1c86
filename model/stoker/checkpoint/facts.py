"""Facts about a checkpoint, from its manifest alone: for people, for the operator and for `--json`.

`meta` comes from the writer and is foreign input: a fact of the wrong type is None.

Pure. Called by the commands and by the task pods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class Facts:
    """The short answer to "what is this checkpoint?"."""

    step: int
    writer: str
    digest: str
    bytes: int
    tokens: int | None
    loss: float | None
    learning_rate: float | None
    elapsed_s: float | None
    """Time of all steps from the start of the run."""
    layout: Mapping[str, Any]
    """The writer's layout: world size, parallel sizes, ZeRO stage."""
    lineage: Mapping[str, Any]
    """Parent checkpoint, job uid, attempt."""
    tensors: int
    pieces: int
    dtypes: Mapping[str, int]
    """Bytes of the tensors by dtype."""
    files: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "writer": self.writer,
            "digest": self.digest,
            "bytes": self.bytes,
            "tokens": self.tokens,
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "elapsed_s": self.elapsed_s,
            "layout": dict(self.layout),
            "lineage": dict(self.lineage),
            "tensors": self.tensors,
            "pieces": self.pieces,
            "dtypes": dict(self.dtypes),
            "files": list(self.files),
        }


def facts_of(manifest: Manifest) -> Facts:
    dtypes: Counter[str] = Counter()
    for tensor in manifest.tensors.values():
        dtypes[tensor.dtype] += tensor.bytes
    return Facts(
        step=manifest.step,
        writer=manifest.writer,
        digest=manifest.digest,
        bytes=manifest.bytes,
        tokens=_integer(manifest.meta.get("tokens")),
        loss=_number(manifest.meta.get("loss")),
        learning_rate=_number(manifest.meta.get("learning_rate")),
        elapsed_s=_number(manifest.meta.get("elapsed_s")),
        layout=_object(manifest.meta.get("layout")),
        lineage=_object(manifest.meta.get("lineage")),
        tensors=len(manifest.tensors),
        pieces=len(manifest.pieces),
        dtypes=dict(sorted(dtypes.items())),
        files=tuple(entry.name for entry in manifest.files),
    )


def _integer(value: object) -> int | None:
    return value if type(value) is int else None


def _number(value: object) -> float | None:
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
