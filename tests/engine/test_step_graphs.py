"""Steps padded to a fixed size and replayed: interpreted on the CPU, with graphs that may read only their buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from stoker.engine.core.messages import Delta
from stoker.engine.sampling import SamplingParams
from stoker.pod.capabilities import KernelsName
from testing.engine.audits import assert_sound
from testing.fixed_cases import draw_from_tests_alone
from testing.model.interpreted import Interpreted

SEATS, BUDGET, BLOCK = 4, 24, 4
VOCAB = 80
"""Each four outputs of a product are a program, which an interpreter computes for all tokens."""
LOOKED_AT = 8
"""Number of replays between two checks, which are slow."""
KINDS = [
    SamplingParams(temperature=0.9, seed=3, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=5),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=3, ignore_eos=True),
    SamplingParams(n=2, seed=4, temperature=1.2, max_tokens=3, ignore_eos=True),
    SamplingParams(seed=7, temperature=2.0, stop_token_ids=tuple(range(3, 50)), max_tokens=6),
    SamplingParams(temperature=0, min_tokens=2, bad_token_ids=(7, 8), logit_bias={9: 3.0}, max_tokens=4),
    SamplingParams(temperature=0, logprobs=1, prompt_logprobs=1, max_tokens=3, ignore_eos=True),
    SamplingParams(seed=6, max_tokens=1),
    SamplingParams(temperature=0.7, seed=8, max_tokens=7, ignore_eos=True),
]


def make_twin() -> Any:
    """Return a twin as small as possible, because interpreted programs are slow."""
    from tests.engine.conftest import SHAPE

    torch.manual_seed(7)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": VOCAB, **heads}
    twin: Any = Qwen3ForCausalLM(Qwen3Config(**(SHAPE | small)))
    return twin.eval()


class Launches(TorchDispatchMode):
    """The launches that torch sees: operations, shapes and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbers = [one for one in args if isinstance(one, int | float)]
        shapes = [tuple(one.shape) for one in args if isinstance(one, torch.Tensor)]
        self.seen.append((str(func), shapes, numbers))
        return func(*args, **(kwargs or {}))


class Poisoned:
    """A graph that is the body itself, called while every host-side value is poisoned."""

    def __init__(self) -> None:
        self.runner: Any = None
        self.replays = 0

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        recorded = self.launches(body)

        def replay() -> None:
            self.replays += 1
            if self.replays % LOOKED_AT:
                with self.wrong_numbers():
                    body()
            else:
                assert self.launches(body) == recorded, "a graph launches the same every time"

        return replay

    def launches(self, body: Callable[[], None]) -> list[Any]:
        launches = Launches()
        with self.wrong_numbers(), launches:
            body()
        return launches.seen

    @contextmanager
    def wrong_numbers(self) -> Iterator[None]:
        values = self.runner.values
        arrays = (self.runner.seats.tables, values.numbers, values.keys, values.num_prompt, values.adjusted_until)
        kept = [array.copy() for array in arrays]
        for array in arrays:
            array[...] = 2**20
        try:
            yield
        finally:
            for array, numbers in zip(arrays, kept, strict=True):
                array[...] = numbers


def engine_of(
    twin: Any,
    *,
    kernels: KernelsName,
    graphs: Any,
    num_blocks: int,
    chunk: int | None,
    deterministic: bool,
    long_prompts: Any = None,
) -> Any:
    from stoker.engine.core.blocks import BlockManager
    from stoker.engine.core.engine import LLMEngine
    from stoker.engine.core.request_check import ModelLimits
    from stoker.engine.core.scheduler import Scheduler
    from stoker.engine.execution.executor import OnDevice
    from stoker.model.kernels.ops import Ops
    from tests.engine.conftest import MAX_LEN, decoder_of, runner_of

    decoder = decoder_of(twin, Ops(kernels, deterministic=deterministic))
    sizes = {"num_blocks": num_blocks, "block_size": BLOCK, "seats": SEATS, "budget": BUDGET}
    runner = runner_of(decoder, **sizes, graphs=graphs, long_prompts=long_prompts)
    scheduler = Scheduler(
        BlockManager(num_blocks, BLOCK),
        max_batch_tokens=BUDGET,
        max_requests=SEATS,
        max_queued_requests=99,
        chunk_tokens=chunk,
    )
    return LLMEngine(OnDevice(runner), scheduler, ModelLimits(VOCAB, MAX_LEN, (2,)), overlap=kernels == "fused")


def capture_wanted(engine: Any) -> None:
    """Capture all graphs that steps have lacked."""
    graphs = engine.executor.runner.graphs
    while graphs is not None and graphs.capture_next(graphs.most_wanted(1)):
        pass


Facts = dict[tuple[str, int], tuple[list[int], list[float], Any]]


@torch.inference_mode()
def answers(engine: Any, requests: list[tuple[int, int, int]]) -> Facts:
    """Return tokens, log-probabilities and reason per request and choice."""
    deltas: list[Delta] = []
    step = 0
    while engine.has_unfinished or step < 5:
        for number, (length, kind, comes) in enumerate(requests):
            if comes == step:
                prompt = [(3 + place * 7) % 60 for place in range(9)] + [
                    (number * 31 + p * 5) % 60 + 3 for p in range(9)
                ]
                engine.add_request(str(number), prompt[-length:] if number % 2 else prompt[:length], KINDS[kind])
        deltas += [delta for _, delta in engine.step()]
        capture_wanted(engine)
        assert_sound(engine.scheduler.audit())
        step += 1
    errors = [delta.error for delta in deltas if delta.error]
    assert not errors, errors
    found: Facts = {}
    for delta in deltas:
        tokens, scores, reason = found.get((delta.request_id, delta.choice), ([], [], None))
        scores += [entry.logprob for entry in (*(delta.logprobs or ()), *(delta.prompt_logprobs or ())) if entry]
        found[delta.request_id, delta.choice] = (tokens + list(delta.tokens), scores, delta.finish_reason or reason)
    return found


REQUESTS = st.lists(
    st.tuples(st.integers(1, 18), st.integers(0, len(KINDS) - 1), st.integers(0, 4)), min_size=2, max_size=5
)


def check_mixes(deterministic: bool, num_random: int) -> None:
    """Check two mixes and random ones; a failure is not shrunk, because interpreted steps are slow."""
    draw_from_tests_alone()
    twin = make_twin()
    seen: set[Any] = set()
    preemptions = 0
    phases = [Phase.explicit, Phase.generate][: 1 + bool(num_random)]

    @settings(max_examples=max(num_random, 1), deadline=None, database=None, derandomize=True, phases=phases)
    @given(requests=REQUESTS, num_blocks=st.sampled_from([8, 40]), chunk=st.sampled_from([None, 5]))
    @example(requests=[(9, 0, 0), (18, 2, 1), (12, 6, 2), (5, 3, 3)], num_blocks=40, chunk=None)
    @example(requests=[(3, 2, 0)], num_blocks=8, chunk=5)
    @example(requests=[(12, 8, 0), (11, 8, 0)], num_blocks=8, chunk=5)
    def check(requests: list[tuple[int, int, int]], num_blocks: int, chunk: int | None) -> None:
        nonlocal preemptions
        setting: dict[str, Any] = {"num_blocks": num_blocks, "chunk": chunk, "deterministic": deterministic}
        capture = Poisoned()
        engine = engine_of(twin, kernels="fused", graphs=capture, **setting)
        capture.runner = engine.executor.runner
        found = answers(engine, requests)
        seen.update(engine.executor.runner.graphs.graphs)
        preemptions += engine.stats().preemptions
        plain = engine_of(twin, kernels="fused" if deterministic else "reference", graphs=False, **setting)
        wanted = answers(plain, requests)
        assert {key: (tokens, reason) for key, (tokens, _, reason) in found.items()} == {
            key: (tokens, reason) for key, (tokens, _, reason) in wanted.items()
        }
        for key, (_, scores, _) in found.items():
            assert np.allclose(scores, wanted[key][1], atol=0 if deterministic else 1e-4), key
        assert engine.stats().owned_blocks == 0

    check()
    assert preemptions > 0
    assert {bool(shape.prompts) for shape in seen} == {True, False}
    variants = {(shape.samples, shape.filtered) for shape in seen if not shape.prompts}
    assert variants == {(True, False), (True, True), (False, False)}
    assert {shape.samples for shape in seen if shape.prompts} == {False}


class Failing(Poisoned):
    """Graphs of which a capture fails, after which there are no more, and some replays before their step.

    After such a replay the buffers hold old content.
    """

    def __init__(self, captures: set[int], replays: set[int]) -> None:
        super().__init__()
        self.bad_captures, self.bad_replays = captures, replays
        self.captures, self.failed = 0, 0

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        self.fail(self.captures in self.bad_captures)
        replay = super().__call__(body)

        def replay_or_fail() -> None:
            if self.replays + 1 in self.bad_replays:
                self.replays += 1
                self.fail(True)
            replay()

        return replay_or_fail

    def fail(self, now: bool) -> None:
        self.failed += now
        if now:
            raise RuntimeError("a graph fails")


def check_failing_steps() -> None:
    """Check that steps with prompts and steps of decodes are computed again, with the next one already under way."""
    twin = make_twin()
    setting: dict[str, Any] = {"num_blocks": 40, "chunk": 5, "deterministic": False}
    capture = Failing(captures={4}, replays={2, 4})
    engine = engine_of(twin, kernels="fused", graphs=capture, **setting)
    capture.runner = engine.executor.runner
    requests = [(9, 8, 0), (7, 1, 1), (6, 0, 1)]
    found = answers(engine, requests)
    assert capture.failed == 3
    assert capture.captures == 4
    assert found == answers(engine_of(twin, kernels="reference", graphs=False, **setting), requests)


def check_no_memory() -> None:
    """Check a memory limit that admits the first graph and not the second."""
    made: list[Callable[[], None]] = []

    def capture(body: Callable[[], None]) -> Callable[[], None]:
        if made:
            raise torch.OutOfMemoryError("full")
        made.append(body)
        return body

    twin = make_twin()
    setting: dict[str, Any] = {"num_blocks": 40, "chunk": None, "deterministic": False}
    engine = engine_of(twin, kernels="fused", graphs=capture, **setting)
    requests = [(9, 0, 0), (5, 1, 1), (7, 0, 1)]
    found = answers(engine, requests)
    assert found == answers(engine_of(twin, kernels="reference", graphs=False, **setting), requests)
    assert len(engine.executor.runner.graphs.graphs) == 1
    assert not engine.executor.capture_next_graph()


def test_steps_as_graphs_when_interpreted(interpreted: Interpreted) -> None:
    """Mixes of requests agree with the reference, and padded steps with unpadded ones bit for bit.

    Captures and replays may fail, and there may be no memory for a second graph.
    """
    mixes = [(check_mixes, (False, 2)), (check_mixes, (True, 0))]
    interpreted.run([*mixes, (check_no_memory, ()), (check_failing_steps, ())])
