"""Sums over peers' memory, in one shot and in two, against sums over NCCL: the same bits, in any order of sizes, in
graphs and out of them, on two GPUs."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
SIZES = [(torch.bfloat16, 4096, 256), (torch.float32, 48, 9), (torch.float16, 1000, 70), (torch.bfloat16, 8192, 8)]
ROWS = (1, 256, 3, 8, 200, 2, 2, 130, 9)
REPLAYS = 40


def sum_on_rank(rank: int, folder: str) -> None:
    from stoker.engine.execution.peer_sums import Longest, PeerSums, peer_sums
    from stoker.engine.ranks.rendezvous import NCCL_DEFAULTS
    from stoker.model.group_sums import GroupSums, ordered_sum
    from stoker.model.kernels.ops import Ops

    os.environ.update(NCCL_DEFAULTS)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    twin = GroupSums(dist.group.WORLD, Ops("fused"))
    with torch.inference_mode():
        for (dtype, columns, most), shots in product(SIZES, (1, 2)):
            most_bytes = most * columns * dtype.itemsize
            peers = peer_sums(twin, columns, dtype, Longest(*(most_bytes if shots == way else 0 for way in (1, 2))))
            assert isinstance(peers, PeerSums)
            for number, rows in enumerate(rows for rows in ROWS if rows <= most):
                check_sums(peers, twin, (rows, columns), dtype, seed=2 * number + rank)
            check_replays(peers, twin, (min(most, 64), columns), dtype, rank)
            whole = twin.gather_columns(torch.full((3, 2), float(rank), device="cuda"))
            assert whole.tolist() == [[0.0, 0.0, 1.0, 1.0]] * 3
            check_dealt(twin, dtype, rank)
            parts = torch.stack([torch.full((1, 8), 2.0**-place, device="cuda", dtype=dtype) for place in range(2)])
            assert torch.equal(peers.sum(parts[rank]), ordered_sum(parts))
    Path(folder, f"done-{rank}").touch()
    torch.cuda.synchronize()
    os._exit(0)  # graphs hold the communicator


def check_sums(peers: object, twin: object, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    from stoker.engine.execution.peer_sums import PeerSums
    from stoker.model.group_sums import GroupSums

    assert isinstance(peers, PeerSums)
    assert isinstance(twin, GroupSums)
    torch.manual_seed(seed)
    part_TD = torch.randn(shape, device="cuda").to(dtype)
    torch.manual_seed(0)
    x_TD, norm_D = torch.randn(shape, device="cuda").to(dtype), torch.randn(shape[1], device="cuda").to(dtype)
    assert peers.way_of(part_TD) is not None
    assert torch.equal(peers.sum(part_TD), twin.sum(part_TD.clone()))
    normed_TD, total_TD = peers.sum_norm(part_TD, x_TD, norm_D, 1e-5)
    expected_normed_TD, expected_TD = twin.sum_norm(part_TD.clone(), x_TD, norm_D, 1e-5)
    assert torch.equal(total_TD, expected_TD)
    torch.testing.assert_close(normed_TD, expected_normed_TD)


def check_dealt(sums: object, dtype: torch.dtype, rank: int) -> None:
    """Check that a graph may deal rows and collect what each rank has of them."""
    from stoker.model.group_sums import GroupSums

    assert isinstance(sums, GroupSums)
    part_Bv = torch.randn(64, 48, device="cuda").to(dtype)
    whole_BV = sums.gather_columns(part_Bv)
    sums.collect_rows(sums.deal_rows(part_Bv)[:, 0])
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        own_bV = sums.deal_rows(part_Bv)
        first_B = sums.collect_rows(own_bV[:, 0])
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(REPLAYS):
        graph.replay()
    assert torch.equal(own_bV, whole_BV[32 * rank : 32 * rank + 32])
    assert torch.equal(first_B, whole_BV[:, 0])


def check_replays(peers: object, twin: object, shape: tuple[int, int], dtype: torch.dtype, rank: int) -> None:
    """Check a graph of several sums, replayed at different times on the ranks, with other sums in between."""
    from stoker.engine.execution.peer_sums import PeerSums
    from stoker.model.group_sums import GroupSums

    assert isinstance(peers, PeerSums)
    assert isinstance(twin, GroupSums)
    part_TD = torch.zeros(shape, device="cuda", dtype=dtype)
    peers.sum(part_TD)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        once_TD = peers.sum(part_TD)
        twice_TD = peers.sum(once_TD)
        over_nccl_TD = twin.sum(once_TD.clone())
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    for replay in range(REPLAYS):
        torch.manual_seed(replay)
        parts = torch.randn(2, *shape, device="cuda").to(dtype)
        if replay % 2 == rank and replay % 8 < 2:
            torch.cuda._sleep(2_000_000)  # this rank is a millisecond late
        part_TD.copy_(parts[rank])
        graph.replay()
        if replay % 3 == 0:
            peers.sum(part_TD[:1])
        expected_TD = (parts[0].float() + parts[1].float()).to(dtype)
        assert torch.equal(once_TD, expected_TD), replay
        assert torch.equal(twice_TD, over_nccl_TD), replay


def test_one_shot_sums_equal_nccl_s(tmp_path: Path) -> None:
    spawn(sum_on_rank, (str(tmp_path),), nprocs=2)
    assert (tmp_path / "done-0").exists()
    assert (tmp_path / "done-1").exists()
