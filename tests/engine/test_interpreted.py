"""The engine with fused kernels, interpreted on the CPU: the path of a GPU, with a graph that replays a closure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tests.model import interpreted

TINY: dict[str, Any] = {"seats": 4, "budget": 24, "num_blocks": 12, "block_size": 16}


def check_decode_inputs(num_rows: int) -> None:
    """Padding, sequences that ended, tables longer than one turn of the copy."""
    from stoker.engine.step_kernels import COLUMNS, NEVER, decode_inputs

    torch.manual_seed(num_rows)
    num_seats, block_size, columns = num_rows + 2, 2, COLUMNS + 9
    tokens_SL = torch.randint(1, 99, (num_seats, columns * block_size), dtype=torch.int32)
    tables_SC = torch.randint(1, 999, (num_seats, columns), dtype=torch.int32)
    ended_S = torch.full((num_seats,), NEVER, dtype=torch.int32)
    seats_B = torch.randperm(num_seats)[:num_rows].int()
    positions_B = torch.randint(0, columns * block_size - 1, (num_rows,), dtype=torch.int32)
    positions_B[0] = columns * block_size - 2
    blocks_B = torch.randint(1000, 2000, (num_rows,), dtype=torch.int32)
    if num_rows > 2:
        seats_B[-1] = -1
        ended_S[seats_B[1].long()] = positions_B[1]
    out = {
        name: torch.full((num_rows,), -77, dtype=torch.int32)
        for name in ("tokens", "positions", "next", "slots", "seq_lens")
    }
    tables_BC = torch.full((num_rows, columns), -77, dtype=torch.int32)
    known_SC = tables_SC.clone()
    decode_inputs(
        torch.stack((seats_B, positions_B, blocks_B)),
        tokens_SL,
        tables_SC,
        ended_S,
        tokens_B=out["tokens"],
        positions_B=out["positions"],
        next_B=out["next"],
        slots_B=out["slots"],
        seq_lens_B=out["seq_lens"],
        block_tables_BC=tables_BC,
        block_size=block_size,
    )
    for row, (seat, position, block) in enumerate(
        zip(seats_B.tolist(), positions_B.tolist(), blocks_B.tolist(), strict=True)
    ):
        found = {name: int(values[row]) for name, values in out.items()}
        column = position // block_size
        if seat < 0:
            assert found == {"tokens": 0, "positions": 0, "next": 0, "slots": -1, "seq_lens": 0}
            continue
        assert int(tables_SC[seat, column]) == block
        lives = int(ended_S[seat]) > position
        assert found == {
            "tokens": int(tokens_SL[seat, position]),
            "positions": position,
            "next": position + 1,
            "slots": block * block_size + position % block_size if lives else -1,
            "seq_lens": position + 1 if lives else 0,
        }
        if lives:
            assert tables_BC[row, : column + 1].tolist() == [*known_SC[seat, :column].tolist(), block]
            assert (tables_BC[row, column + 1 :] == -77).all()


def check_finish_rows() -> None:
    """A stop token ends its seat; computing a position again takes that back; other ends stay."""
    from stoker.engine.step_kernels import NEVER, finish_rows

    seats_B = torch.tensor([2, 0, -1, 3, 1], dtype=torch.int32)
    next_B = torch.tensor([10, 20, 0, 30, 40], dtype=torch.int32)
    tokens_B = torch.tensor([7, 8, 0, 9, 6], dtype=torch.int64)
    valid_B = torch.tensor([True, True, True, False, True])
    stops_SE = torch.tensor([[1, -1], [6, 2], [5, 7], [1, -1]], dtype=torch.int32)
    ended_S = torch.tensor([20, 39, NEVER, 25], dtype=torch.int32)
    out_2B = torch.full((2, 5), -77, dtype=torch.int32)
    finish_rows(seats_B, next_B, tokens_B, valid_B, stops_SE, ended_S, out_2B)
    assert ended_S.tolist() == [NEVER, 39, 10, 25]
    assert out_2B.tolist() == [[7, 8, 0, 9, 6], [1, 1, 1, 0, 1]]


def check_engine(architecture: str) -> None:
    """Every kind of request, overlapped, with captured decode steps: the tokens of the reference kernels, step by step."""
    from stoker.engine.blocks import BlockManager
    from stoker.engine.engine import Limits, LLMEngine
    from stoker.engine.executor import InProcess, OnDevice
    from stoker.engine.scheduler import Scheduler
    from stoker.model.kernels.ops import Ops
    from tests.engine.conftest import MAX_LEN, VOCAB, decoder_of, make_twin, runner_of
    from tests.engine.test_engine import random_prompts, tokens_of
    from tests.engine.test_overlap import PARAMS

    twin = make_twin(architecture)
    answers = []
    for kernels in ("reference", "fused"):
        decoder = decoder_of(twin, Ops(kernels))
        blocks = BlockManager(TINY["num_blocks"], TINY["block_size"])
        runner = runner_of(
            decoder,
            num_blocks=blocks.num_blocks,
            block_size=blocks.block_size,
            seats=TINY["seats"],
            budget=TINY["budget"],
            graphs=lambda body: body,
        )
        scheduler = Scheduler(
            blocks, max_batch_tokens=TINY["budget"], max_requests=TINY["seats"], max_queued_requests=99
        )
        execute = OnDevice if kernels == "fused" else InProcess
        engine = LLMEngine(execute(runner), scheduler, Limits(VOCAB, MAX_LEN, (2,)), overlap=kernels == "fused")
        prompts = random_prompts(3, seed=4, shared=True)
        for index, params in enumerate((PARAMS[1], PARAMS[3], PARAMS[4])):
            engine.add_request(str(index), prompts[index][:17], replace(params, max_tokens=4))
        deltas = []
        with torch.inference_mode():
            while engine.has_unfinished:
                deltas += [delta for _, delta in engine.step()]
        assert all(delta.error is None for delta in deltas), [delta.error for delta in deltas]
        answers.append(tokens_of(deltas))
        if kernels == "fused":
            assert runner.decode is not None
            assert len(runner.decode.graphs) >= 2
    assert answers[0] == answers[1]


def test_decode_inputs_follow_the_seats_and_the_stop_test_marks_where_a_sequence_ended() -> None:
    interpreted.run([*((check_decode_inputs, (num_rows,)) for num_rows in (1, 3, 8)), (check_finish_rows, ())])


def test_the_fused_engine_answers_as_the_reference() -> None:
    interpreted.run([(check_engine, ("qwen3",))])
