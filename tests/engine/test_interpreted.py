"""The engine with fused kernels, interpreted on the CPU: the path of a GPU, with a graph that replays a closure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from testing.model.interpreted import Interpreted

TINY: dict[str, Any] = {"seats": 4, "budget": 24, "num_blocks": 12, "block_size": 16}


def check_pass_inputs(num_decodes: int, prompts: tuple[tuple[int, int], ...]) -> None:
    """Check padding, sequences that ended, and tables longer than one turn of the copy.

    `prompts`: start and length of each chunk.
    """
    from stoker.engine.execution.pass_inputs import pack_inputs, split
    from stoker.engine.execution.pass_shape import PassShape
    from stoker.engine.execution.step_kernels import COLUMNS, NEVER, TILE, fill_pass
    from stoker.engine.execution.step_rows import StepRows
    from stoker.model.paged_attend import PagedSize
    from stoker.model.paged_buffers import PagedBuffers

    torch.manual_seed(num_decodes)
    num_tokens = num_decodes + sum(length for _, length in prompts)
    if prompts:
        shape = PassShape(tokens=num_tokens + TILE + 5, decodes=num_decodes + 2, prompts=len(prompts) + 2)
    else:
        shape = PassShape(tokens=num_decodes + 2, decodes=num_decodes + 2, prompts=0)
    num_seats, block_size, columns = shape.sequences, 2, COLUMNS + 9
    tokens_SL = torch.randint(1, 99, (num_seats, columns * block_size), dtype=torch.int32)
    tables_SC = torch.randint(1, 999, (num_seats, columns), dtype=torch.int32)
    ended_S = torch.full((num_seats,), NEVER, dtype=torch.int32)
    seats = np.random.default_rng(num_decodes).permutation(num_seats)[: num_decodes + len(prompts)]
    starts = np.random.default_rng(1).integers(0, columns * block_size - 1, num_decodes)
    starts[:1] = columns * block_size - 2
    if num_decodes > 1:
        ended_S[seats[1]] = int(starts[1])
    own = np.arange(num_decodes)
    rows = StepRows(
        seats=seats,
        starts=np.array([*starts, *(start for start, _ in prompts)], dtype=np.int64),
        lengths=np.array([*([1] * num_decodes), *(length for _, length in prompts)], dtype=np.int64),
        num_decodes=num_decodes,
        places=np.arange(len(seats)),
        sample_chunks=own,
        sample_seats=seats[:num_decodes],
    )
    blocks = np.arange(1000, 1000 + num_decodes)
    size = PagedSize(max_tokens=shape.tokens, max_sequences=shape.sequences, max_blocks=columns)
    buffers = PagedBuffers(torch.zeros(1, 1, 2, block_size, 1, 16), 1, size)
    for buffer in (buffers.slots, buffers.query_start, buffers.seq_lens, buffers.block_tables):
        buffer.fill_(-77)
    tokens_T, positions_T = torch.full((2, shape.tokens), -77, dtype=torch.int32)
    known_SC = tables_SC.clone()
    inputs = split(torch.from_numpy(pack_inputs(shape, rows, blocks)), shape)
    fill_pass(
        inputs, tokens_SL, tables_SC, ended_S,
        tokens_T=tokens_T, positions_T=positions_T, buffers=buffers, block_size=block_size,
    )  # fmt: skip
    expected = torch.zeros(3, shape.tokens, dtype=torch.int32)
    expected[2] = -1
    seq_lens = torch.zeros(shape.sequences, dtype=torch.int32)
    for chunk, (seat, start, length) in enumerate(zip(seats, rows.starts, rows.lengths, strict=True)):
        is_decode = chunk < num_decodes
        sequence = chunk if is_decode else shape.decodes + chunk - num_decodes
        table = known_SC[seat].clone()
        if is_decode:
            table[start // block_size] = int(blocks[chunk])
            assert torch.equal(tables_SC[seat], table)
        lives = int(ended_S[seat]) > start
        for position in range(start, start + length):
            slot = int(table[position // block_size]) * block_size + position % block_size
            row = int(rows.begins[chunk]) + position - start
            expected[:, row] = torch.tensor([tokens_SL[seat, position], position, slot if lives else -1])
        seq_lens[sequence] = int(start + length) if lives else 0
        used = -(-int(seq_lens[sequence]) // block_size)
        assert torch.equal(buffers.block_tables[sequence, :used], table[:used])
        assert (buffers.block_tables[sequence, used:] == -77).all()
    assert torch.equal(torch.stack((tokens_T, positions_T, buffers.slots)), expected)
    assert torch.equal(buffers.seq_lens, seq_lens)
    if prompts:
        decodes = [min(row, num_decodes) for row in range(shape.decodes)]
        ends = [num_tokens] * (shape.prompts + 1 - len(prompts))
        assert buffers.query_start.tolist() == [*decodes, *rows.begins[num_decodes:-1].tolist(), *ends]


def check_finish_rows() -> None:
    """Check the ends of rows, and the tokens of their seats.

    A stop token ends its seat; computing a position again takes that back; other ends stay.
    """
    from stoker.engine.execution.step_kernels import NEVER, finish_rows

    seats_B = torch.tensor([2, 0, -1, 3, 1], dtype=torch.int32)
    next_B = torch.tensor([10, 20, 0, 30, 40], dtype=torch.int32)
    tokens_B = torch.tensor([7, 8, 0, 9, 6], dtype=torch.int64)
    valid_B = torch.tensor([True, True, True, False, True])
    stops_SE = torch.tensor([[1, -1], [6, 2], [5, 7], [1, -1]], dtype=torch.int32)
    ended_S = torch.tensor([20, 39, NEVER, 25], dtype=torch.int32)
    out_2B = torch.full((2, 5), -77, dtype=torch.int32)
    tokens_SL = torch.full((4, 48), -5, dtype=torch.int32)
    finish_rows(seats_B, next_B, tokens_B, valid_B, stops_SE, ended_S, out_2B, tokens_SL)
    assert (tokens_SL != -5).nonzero().tolist() == [[0, 20], [1, 40], [2, 10], [3, 30]]
    assert tokens_SL[tokens_SL != -5].tolist() == [8, 6, 7, 9]
    assert ended_S.tolist() == [NEVER, 39, 10, 25]
    assert out_2B.tolist() == [[7, 8, 0, 9, 6], [1, 1, 1, 0, 1]]


def check_engine(architecture: str) -> None:
    """Check every kind of request, overlapped, with captured decode steps; also cut into two stages.

    The tokens are those of the reference kernels, step by step.
    """
    from stoker.engine.core.blocks import BlockManager
    from stoker.engine.core.engine import LLMEngine
    from stoker.engine.core.grammars import GrammarCompiler
    from stoker.engine.core.request_check import ModelLimits
    from stoker.engine.core.scheduler import Scheduler
    from stoker.engine.core.step_flight import StepFlight
    from stoker.engine.execution.executor import InProcess, OnDevice
    from stoker.engine.execution.runner import Runner
    from stoker.engine.execution.stage_links import StageLinks
    from stoker.engine.output_grammar import OutputGrammar
    from stoker.model.kernels.ops import Ops
    from testing.engine.stages import local_stages
    from testing.engine.tiny_tokenizer import tokenizer_json
    from tests.engine.conftest import MAX_LEN, VOCAB, decoder_of, make_twin, runner_of
    from tests.engine.test_engine import random_prompts, tokens_of
    from tests.engine.test_overlap import PARAMS

    twin = make_twin(architecture)
    answers = []
    grammars = GrammarCompiler(tokenizer_json(), VOCAB, (2,))
    words = replace(PARAMS[1], grammar=OutputGrammar.regex("[ab]{2}x"), bad_sequences=((3, 4),))
    for ops, stages in ((Ops("reference"), 1), (Ops("fused"), 1), (Ops("fused"), 2)):
        blocks, overlap = BlockManager(TINY["num_blocks"], TINY["block_size"]), ops.kernels == "fused"

        def make_stage(layers: range | None, links: StageLinks | None, ops: Ops = ops) -> Runner:
            return runner_of(decoder_of(twin, ops, layers=layers), graphs=lambda body: body, links=links, **TINY)

        if stages == 1:
            runner = make_stage(None, None)
            capture = runner.capture
            executor: Any = OnDevice(runner) if overlap else InProcess(runner)
        else:
            sizes = {"hidden_size": twin.config.hidden_size, "num_seats": TINY["seats"]}
            executor = local_stages(make_stage, [range(1), range(1, 2)], **sizes)
            runner, capture = executor.stages[-1], executor.capture
        scheduler = Scheduler(
            blocks,
            max_batch_tokens=TINY["budget"],
            max_requests=TINY["seats"],
            max_queued_requests=99,
            flight=StepFlight(stages, overlap=overlap),
        )
        engine = LLMEngine(executor, scheduler, ModelLimits(VOCAB, MAX_LEN, (2,)), overlap=overlap)
        engine.grammars = grammars
        prompts = random_prompts(4, seed=4, shared=True)
        requests = dict(enumerate((PARAMS[1], PARAMS[3], PARAMS[4], words)))
        for index in requests if stages == 1 else (0, 3):  # interpreted programs are slow
            engine.add_request(str(index), prompts[index][:17], replace(requests[index], max_tokens=4))
        deltas = []
        with torch.inference_mode():
            while engine.has_unfinished:
                deltas += [delta for _, delta in engine.step()]
                shape = None if runner.graphs is None else runner.graphs.missing(runner.graphs.most_wanted(1))
                if shape is not None:
                    capture(shape)
        assert all(delta.error is None for delta in deltas), [delta.error for delta in deltas]
        answers.append(tokens_of(deltas))
        if overlap:
            assert runner.graphs is not None
            assert {bool(shape.prompts) for shape in runner.graphs.graphs} == {True, False}
    assert answers[0] == answers[1]
    assert answers[2] == {key: tokens for key, tokens in answers[0].items() if key[0] in "03"}


def check_a_graph_that_another_rank_lacks() -> None:
    """Check that a rank keeps no graph that another one could not capture, and captures no more."""
    from stoker.model.kernels.ops import Ops
    from tests.engine.conftest import decoder_of, make_twin, runner_of

    decoder = decoder_of(make_twin("qwen3"), Ops("fused"))
    runner = runner_of(decoder, num_blocks=4, block_size=16, seats=2, budget=4, graphs=lambda body: body)
    assert runner.graphs is not None
    seen: list[bool] = []

    def agree(holds: bool) -> bool:
        seen.append(holds)
        return len(seen) == 1

    runner.graphs.agree = agree
    first = runner.next_capture(first=True)
    assert first is not None
    runner.capture(first)
    assert list(runner.graphs.graphs) == [first]
    second = runner.next_capture()
    assert second is not None
    runner.capture(second)
    assert list(runner.graphs.graphs) == [first], "all ranks still have this one"
    assert seen == [True, True]
    assert runner.next_capture() is None


def check_the_steps_before_a_capture() -> None:
    """Check that padding goes through two blocks before all are captured."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from stoker.model.kernels.ops import Ops
    from tests.engine.conftest import SHAPE, decoder_of, runner_of

    twin = Qwen3ForCausalLM(Qwen3Config(**(SHAPE | {"num_hidden_layers": 4}))).eval()
    decoder = decoder_of(twin, Ops("fused"))
    computed: list[int] = []
    for block in decoder.blocks:
        block.register_forward_pre_hook(lambda block, _: computed.append(block.layer))
    runner = runner_of(decoder, num_blocks=4, block_size=16, seats=2, budget=4, graphs=call_once)
    first = runner.next_capture(first=True)
    assert first is not None
    runner.capture(first)
    assert computed == [0, 1, 0, 1, 2, 3]


def call_once(body: Callable[[], None]) -> Callable[[], None]:
    body()
    return body


PASSES: list[tuple[int, tuple[tuple[int, int], ...]]] = [
    (1, ()),
    (8, ()),
    (0, ((0, 70),)),
    (3, ((0, 5), (529, 1), (7, 90))),
    (2, ((4, 1),)),
]


def test_inputs_of_a_pass_follow_the_seats_and_the_stop_test_marks_where_a_sequence_ended(
    interpreted: Interpreted,
) -> None:
    interpreted.run([*((check_pass_inputs, case) for case in PASSES), (check_finish_rows, ())])


def test_the_fused_engine_answers_as_the_reference(interpreted: Interpreted) -> None:
    interpreted.run(
        [
            (check_engine, ("qwen3",)),
            (check_a_graph_that_another_rank_lacks, ()),
            (check_the_steps_before_a_capture, ()),
        ]
    )
