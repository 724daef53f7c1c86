"""A short run on a GPU with kernels that were compiled ahead of time, in a process of its own; prints what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from stoker.model.kernels.ahead.look_up import look_up_shipped_kernels
from testing.trainer.launched_kernels import DENSE, config_of
from testing.trainer.tiny_run import alone, train

CHANGES = {"attention": "stoker", "data__validation": {"fraction": 0.1, "every_steps": 2}, "training__total_steps": 3}


def main(folder: Path, architecture: str) -> None:
    config = config_of(CHANGES)
    run = folder / "trainer.json"
    run.write_text(json.dumps(config.model_dump(mode="json") | {"model": asdict(DENSE)}))
    command = [sys.executable, "-m", "stoker.engine.kernels_main", "build", "--trainer", str(run)]
    subprocess.run([*command, "--architecture", architecture, "--folder", os.environ["STOKER_KERNELS"]], check=True)
    context = alone("cuda")
    lookups = look_up_shipped_kernels("fused", context.device)
    assert lookups is not None
    settings = config.checkpoint.model_copy(update={"root": str(folder / "root")})
    train(config.model_copy(update={"checkpoint": settings}), replace(context, lookups=lookups), DENSE)
    print(json.dumps({name: [one for one in found if "__grp__" not in one] for name, found in asdict(lookups).items()}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
