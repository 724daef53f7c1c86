"""Facts about a run that are alike in all of its checkpoints: layout, configuration, lineage, kernels, adapters.

Pure; called by `build`. The loop adds those of the moment.
"""

from __future__ import annotations

from typing import Any

import torch

from stoker.model.kernels.kernel_set import resolve_kernels
from stoker.trainer.protocol.config import JobIdentity, TrainerConfig
from stoker.trainer.rank.kernel_choice import make_ops
from stoker.trainer.rank.mesh import Mesh
from stoker.trainer.rank.resume import ResumePoint
from stoker.trainer.rank.run_inputs import lora_settings


def run_facts(
    config: TrainerConfig, mesh: Mesh, device: torch.device, fingerprint: str, resume: ResumePoint | None
) -> dict[str, Any]:
    """Return the facts as a manifest's `meta` has them. `fingerprint`: of the corpus."""
    adapter = adapter_facts(config)
    return {
        "layout": {**mesh.dims.layout(), "zero_stage": config.memory.zero_stage},
        "config": config.model_dump(mode="json"),
        "rng": {
            "seed": config.training.seed,
            "kind": "none: nothing random after the initial weights and the data order",
        },
        "lineage": _lineage(config.job, resume),
        "corpus_fingerprint": fingerprint,
        "kernels": _kernels(config, device),
        **({"adapter": adapter} if adapter else {}),
    }


def _lineage(job: JobIdentity, resume: ResumePoint | None) -> dict[str, Any]:
    return {
        "parent": {"folder": resume.folder, "digest": resume.digest} if resume else None,
        "job_uid": job.uid,
        "job": f"{job.namespace}/{job.name}",
        "attempt": job.attempt,
    }


def _kernels(config: TrainerConfig, device: torch.device) -> dict[str, str]:
    return {
        "kernels": resolve_kernels(config.kernels, device.type),
        "attention": make_ops(config, device)[1],
        "torch": torch.__version__,
    }


def adapter_facts(config: TrainerConfig) -> dict[str, Any] | None:
    """What a reader needs to merge the adapters of a checkpoint."""
    lora = lora_settings(config)
    return None if lora is None else {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
