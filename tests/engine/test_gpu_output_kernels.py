"""The output layer's kernels of two ranks on two GPUs are loaded with the weights, before the first request."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from testing.engine.rank_engines import config_of, saved

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


class ProductRows(TorchDispatchMode):
    """Notes the numbers of rows of all products with a weight of so many columns that cuBLAS computes."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.rows = columns, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.__name__ and args[1].shape[1] == self.columns:
            self.rows.add(len(args[0]))
        return func(*args, **(kwargs or {}))


def load_on_rank(rank: int, folder: str) -> None:
    from stoker.engine.execution.load import load_runner
    from stoker.engine.execution.pass_shape import all_output_rows
    from stoker.engine.plan import plan_engine
    from stoker.engine.ranks.rendezvous import NCCL_DEFAULTS
    from stoker.model.weights.source import open_weights

    os.environ.update(NCCL_DEFAULTS)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    crowd = {"max_batch_tokens": 128, "max_requests": 100}
    config = config_of(Path(folder), 2, device="cuda", model={"path": folder, "dtype": "bfloat16"}, scheduler=crowd)
    source = open_weights(folder)
    with ProductRows(source.config.vocab_size // 2) as products:
        runner = load_runner(plan_engine(config, source, 2**33), dist.group.WORLD)
    assert runner.graphs is not None
    assert not runner.graphs.graphs, "they are captured later"
    assert products.rows >= {rows for rows in all_output_rows(100) if rows > 64}
    Path(folder, f"done-{rank}").touch()
    torch.cuda.synchronize()
    os._exit(0)  # as the ranks' processes, without waiting for each other


def test_every_number_of_rows_is_computed_while_the_weights_are_loaded(twins: dict[str, Any], tmp_path: Path) -> None:
    spawn(load_on_rank, (str(saved(twins["llama"], tmp_path)),), nprocs=2)
    assert (tmp_path / "done-0").exists()
    assert (tmp_path / "done-1").exists()
