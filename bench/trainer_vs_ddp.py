"""Tokens per second of the trainer against a plain PyTorch DDP loop: same model, same batches, same two cores.

Both run in two spawned Gloo ranks with one thread each. DDP: `DistributedDataParallel` with `no_sync` while it
accumulates, fused AdamW over all parameters on each rank, `clip_grad_norm_`, and autocast for bf16 (fp32 parameters),
which is how its users keep fp32 masters. Ours: the step of `stoker.trainer` with ZeRO-1. The two take turns, so that a
change of the machine's speed meets both, and the best step of each counts (other work on the machine only makes steps
longer); the ratios of medians and of CPU time of rank 0 are given too.

    python bench/trainer_vs_ddp.py                      # bf16 and fp32, about 3 minutes
    python bench/trainer_vs_ddp.py --precision bf16 --model smollm2

The last line is JSON. Measured with torch 2.11, two cores (AVX-512 BF16, one thread per rank) of an otherwise idle
machine, tokens/s:

    model                                   precision   stoker      DDP   ratio
    small (15.7 M), 8 x 512 tokens          bf16        5692.8   2631.7   2.16
    small (15.7 M), 8 x 512 tokens          fp32        2623.3   2591.4   1.01
    smollm2 (134.5 M), 4 x 256 tokens       bf16         529.7    287.3   1.84
    smollm2 (134.5 M), 4 x 256 tokens       fp32         295.6    281.2   1.05
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stoker.model.attend import PackedAttend
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.pod.config_file import parse
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.step_signals import StepSignals
from stoker.trainer.rank.communicator import make_communicator
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.mesh import data_parallel_mesh
from stoker.trainer.rank.train_step import ForwardPass, TrainStep
from stoker.trainer.rank.zero_maker import make_zero

RANKS = 2
MODELS = {
    "small": {
        "vocab_size": 8192,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_layers": 8,
        "num_heads": 6,
        "num_kv_heads": 2,
    },
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
    },
}
RATE = 1e-4


def model_config(name: str) -> ModelConfig:
    return ModelConfig(architecture="llama", head_dim=64, tie_embeddings=True, **MODELS[name])


def micro_batch(seed: int, vocab_size: int, tokens: int) -> MicroBatch:
    """Return two documents in one sequence."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, tokens + 1)
    half = tokens // 2
    positions = np.concatenate([np.arange(half), np.arange(tokens - half)])
    cuts = np.array([0, half, tokens], dtype=np.int32)
    return MicroBatch(ids[:-1], positions, ids[1:], np.ones(tokens, np.float32), cuts, tokens - half)


def trainer_config(precision: str) -> TrainerConfig:
    fields: dict[str, Any] = {
        "job": {"name": "bench", "uid": "bench", "writer": "00000000"},
        "gang": {"ranks_per_node": RANKS},
        "termination_log": "unused",
        "work_dir": "unused",
        "model": {},
        "training": {"total_steps": 1},
        "memory": {"precision": precision},
        "data": {"sources": [{"name": "none", "path": "none"}]},
        "checkpoint": {"root": "unused"},
    }
    return parse(TrainerConfig, fields)


class Loss(nn.Module):
    """The decoder and its loss as one module, as DDP requires."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, batch: MicroBatch) -> Tensor:
        attend = PackedAttend(self.decoder.ops, "auto", torch.from_numpy(batch.cu_seqlens), batch.max_seqlen)
        hidden_TD = self.decoder(torch.from_numpy(batch.tokens_T), torch.from_numpy(batch.positions_T), attend)
        targets_T, weights_T = torch.from_numpy(batch.targets_T), torch.from_numpy(batch.weights_T)
        return self.decoder.cross_entropy(hidden_TD, targets_T, weights_T).loss_sum


class DdpLoop:
    """The plain DDP loop."""

    def __init__(self, decoder: Decoder, bf16: bool) -> None:
        self.model = DistributedDataParallel(Loss(decoder), gradient_as_bucket_view=True)
        groups = [
            {"params": [p for p in decoder.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in decoder.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)
        self.bf16 = bf16

    def step(self, batches: list[MicroBatch], targets: int) -> float:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                    loss = self.model(batch) * (RANKS / targets)  # DDP averages over ranks
                loss.backward()
            total += loss.detach() / RANKS
        dist.all_reduce(total)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(total)


class StokerLoop:
    """The loop of the product's step."""

    def __init__(self, decoder: Decoder, bf16: bool) -> None:
        communicator = make_communicator(range(RANKS), torch.device("cpu"))
        assert communicator is not None
        config = trainer_config("bf16" if bf16 else "fp32")
        zero = make_zero(config, decoder, data_parallel_mesh(communicator), torch.device("cpu"))
        self.train_step = TrainStep(ForwardPass(decoder, "sdpa", torch.device("cpu"), zero.ready), zero, 1.0)
        self.steps = 0

    def step(self, batches: list[MicroBatch], targets: int) -> float:
        self.steps += 1
        return self.train_step(self.steps, batches, len(batches), targets, RATE, StepSignals).loss


def work(rank: int, port: int, options: argparse.Namespace, precision: str, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    config = model_config(options.model)
    loops: dict[str, DdpLoop | StokerLoop] = {}
    for name, kind in {"ddp": DdpLoop, "stoker": StokerLoop}.items():
        decoder = Decoder(config, Ops())
        decoder.init_weights(0)
        loops[name] = kind(decoder, precision == "bf16")
    share = options.batch // RANKS
    batches = [micro_batch(rank * share + index, config.vocab_size, options.tokens) for index in range(share)]
    times: dict[str, list[float]] = {name: [] for name in loops}
    losses: dict[str, list[float]] = {name: [] for name in loops}
    cpu_s = dict.fromkeys(loops, 0.0)
    for step in range(options.steps + options.warmup):
        for name, loop in loops.items():
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            losses[name].append(loop.step(batches, options.batch * options.tokens))
            if step >= options.warmup:
                times[name].append(time.perf_counter() - start)
                cpu_s[name] += time.process_time() - start_cpu
    if rank == 0:
        results.put((times, losses, cpu_s, config.num_parameters))
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace, precision: str) -> dict[str, Any]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    ranks = [context.Process(target=work, args=(rank, port, options, precision, results)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    times, losses, cpu_s, parameters = results.get()
    for process in ranks:
        process.join()
    tokens = options.batch * options.tokens
    speed = {name: tokens / min(seconds) for name, seconds in times.items()}
    median = {name: tokens / statistics.median(seconds) for name, seconds in times.items()}
    return {
        "precision": precision,
        "parameters": parameters,
        "tokens_per_step": tokens,
        "stoker_tokens_per_s": round(speed["stoker"], 1),
        "ddp_tokens_per_s": round(speed["ddp"], 1),
        "ratio": round(speed["stoker"] / speed["ddp"], 3),
        "median_ratio": round(median["stoker"] / median["ddp"], 3),
        "cpu_time_ratio": round(cpu_s["ddp"] / cpu_s["stoker"], 3),
        "last_loss": {name: round(values[-1], 5) for name, values in losses.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--precision", choices=["bf16", "fp32", "both"], default="both")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step over both ranks")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    options = parser.parse_args()
    found = []
    for precision in ["bf16", "fp32"] if options.precision == "both" else [options.precision]:
        found.append(measure(options, precision))
        line = found[-1]
        print(
            f"{options.model} {precision}: stoker {line['stoker_tokens_per_s']} tokens/s, "
            f"DDP {line['ddp_tokens_per_s']} tokens/s, "
            f"ratio {line['ratio']} (goal >= 1.0)"
        )
    print(json.dumps({"bench": "trainer_vs_ddp", "torch": torch.__version__, "results": found}))


if __name__ == "__main__":
    main()
