"""Several ranks (Gloo, or NCCL with one GPU each) as spawned processes, for tests: each runs one module-level function and returns a value."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(
    function: Callable[..., Any], size: int, *args: Any, timeout_s: float = 300.0, backend: str = "gloo"
) -> list[Any]:
    """Call `function(rank, size, *args)` in `size` processes that share a process group; their results by rank."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    workers = [
        context.Process(target=_work, args=(function, rank, size, port, results, args, backend), daemon=True)
        for rank in range(size)
    ]
    for worker in workers:
        worker.start()
    try:
        answers = dict(results.get(timeout=timeout_s) for _ in workers)
    finally:
        for worker in workers:
            worker.join(10)
            worker.kill()
    failed = {rank: answer for rank, (good, answer) in answers.items() if not good}
    assert not failed, "\n".join(f"rank {rank}:\n{answer}" for rank, answer in failed.items())
    return [answers[rank][1] for rank in range(size)]


def _work(
    function: Callable[..., Any], rank: int, size: int, port: int, results: Any, args: tuple[Any, ...], backend: str
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        dist.init_process_group(backend, rank=rank, world_size=size)
        results.put((rank, (True, function(rank, size, *args))))
    except BaseException:  # noqa: BLE001  # whatever it was, the test shows it
        results.put((rank, (False, traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
