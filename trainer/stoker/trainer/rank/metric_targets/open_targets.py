"""The targets of a configuration: check of their packages, and opening."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

from stoker.checkpoint.bucket_storage import is_bucket_path
from stoker.pod.config_file import ConfigError
from stoker.pod.field_names import manifest_name
from stoker.trainer.protocol.config import LoggingConfig, TrainerConfig
from stoker.trainer.rank.metric_targets.mlflow_run import MlflowRun
from stoker.trainer.rank.metric_targets.target import MetricTarget
from stoker.trainer.rank.metric_targets.tensorboard_files import TensorboardFiles
from stoker.trainer.rank.metric_targets.wandb_run import WandbRun

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""Field of `logging`, which is also its extra -> package that it needs."""


def check_targets(logging: LoggingConfig) -> None:
    """Check fields and packages of the targets before anything is loaded. Raises ConfigError."""
    check_fields(logging)
    check_packages(logging)


def check_packages(logging: LoggingConfig) -> None:
    """Check that each target's package is installed.

    Raises:
        ConfigError: one is not; the message names its extra.
    """
    for field, package in PACKAGES.items():
        if getattr(logging, field) is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(f"logging.{field} needs the package {package}: install stoker[{field}]")


def check_fields(logging: LoggingConfig) -> None:
    """Check the fields of the targets that the configuration passes on.

    Raises:
        ConfigError: one is missing or unknown.
    """
    known = {
        "wandb": ({"project"}, {"entity", "group", "name", "tags"}),
        "mlflow": ({"tracking_uri", "experiment"}, {"run_name"}),
    }
    for field, (needed, optional) in known.items():
        given = getattr(logging, field)
        if given is not None and not needed <= set(given) <= needed | optional:
            wanted, others, found = (sorted(map(manifest_name, names)) for names in (needed, optional, given))
            raise ConfigError(
                f"logging.{field}: {' and '.join(wanted)} are needed, also allowed: {', '.join(others)}; got {found}"
            )


def open_targets(config: TrainerConfig, done: int) -> list[MetricTarget]:
    """Open the targets of the rank that leads. `done`: steps of earlier attempts.

    Raises:
        OSError: a folder cannot be written, or a server does not answer.
    """
    logging, job = config.logging, config.job
    plain = config.model_dump(mode="json")
    found: list[MetricTarget] = []
    if logging.tensorboard is not None:
        found.append(TensorboardFiles(logging.tensorboard, done, is_first=job.attempt == 0))
    if logging.wandb is not None:
        root = Path(config.checkpoint.root)
        folder = (Path(config.work_dir) if is_bucket_path(root) else root) / "logs"
        found.append(WandbRun(logging.wandb, run_id(job.uid), job.name, folder, plain))
    if logging.mlflow is not None:
        sections = ("model", "parallelism", "training", "optimization", "memory")
        parameters = {
            f"{section}.{name}": value if isinstance(value, str) else json.dumps(value)
            for section in sections
            for name, value in (plain[section] or {}).items()
        }
        found.append(MlflowRun(logging.mlflow, job.uid, job.name, parameters))
    return found


def run_id(job_uid: str) -> str:
    """The same short name in every attempt of a job."""
    return hashlib.blake2b(job_uid.encode(), digest_size=8).hexdigest()
