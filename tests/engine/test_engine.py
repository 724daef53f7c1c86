"""The engine's tokens are those of transformers, alone or together, in any chunks, with any cache, after preemption."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest
import torch
import transformers

from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.messages import Delta
from stoker.engine.errors import ExecutorLost, RequestRefused
from stoker.engine.execution.runner import Runner
from stoker.engine.execution.step import StepInput, StepOutput
from stoker.engine.sampling import SamplingParams
from stoker.pod.histogram import Histogram
from testing.engine.audits import assert_sound
from tests.engine.conftest import MAX_LEN, VOCAB, MakeEngine

OUTPUT = 20
Answers = dict[tuple[str, int], list[int]]


def random_prompts(count: int, seed: int = 0, shared: bool = False) -> list[list[int]]:
    rng = random.Random(seed)
    start = [rng.randrange(3, VOCAB) for _ in range(11)] if shared else []
    return [start + [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 60))] for _ in range(count)]


def drive(engine: LLMEngine) -> list[Delta]:
    deltas: list[Delta] = []
    while engine.has_unfinished:
        deltas += [delta for _, delta in engine.step()]
        assert_sound(engine.scheduler.audit())
    return deltas


def tokens_of(deltas: list[Delta]) -> Answers:
    """Return the output tokens of every choice, the end token included."""
    answers: Answers = defaultdict(list)
    for delta in deltas:
        answers[delta.request_id, delta.choice] += delta.tokens
        if delta.stop_token is not None:
            answers[delta.request_id, delta.choice].append(delta.stop_token)
    return dict(answers)


def run(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    answers = tokens_of(drive(engine))
    return [answers[str(index), 0] for index in range(len(prompts))]


GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT)


@pytest.fixture(scope="session")
def expected(twins: dict[str, transformers.PreTrainedModel]) -> dict[str, list[list[int]]]:
    """The greedy answers of transformers to 50 prompts, one at a time."""
    return {name: [generate(twins[name], prompt) for prompt in random_prompts(50)] for name in ("llama", "qwen3")}


@torch.inference_mode()
def generate(twin: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    inputs = torch.tensor([prompt])
    complete: Any = twin.generate
    output = complete(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=OUTPUT, pad_token_id=0
    )
    return list(output[0, len(prompt) :].tolist())


def assert_same(twin: transformers.PreTrainedModel, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    """Assert equal tokens; a first difference needs the reference's two best logits to be closer than 1e-4."""
    if ours == theirs:
        return
    place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    with torch.inference_mode():
        best = twin(torch.tensor([prompt + theirs[:place]])).logits[0, -1].topk(2).values
    assert best[0] - best[1] < 1e-4, f"token {place}: {ours} is not {theirs}"


SETTINGS = {
    "together": {},
    "small chunks": {"chunk": 5, "budget": 32, "seats": 16},
    "one token at a time": {"chunk": 1, "budget": 64},
    "big blocks": {"block_size": 16, "num_blocks": 300},
    "no prefix cache": {"prefix_cache": False},
    "preempted": {"num_blocks": 45},
    "preempted, no cache": {"num_blocks": 45, "prefix_cache": False},
    "deterministic": {"deterministic": True, "seats": 8},
}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_greedy_tokens_equal_transformers(
    architecture: str,
    setting: dict[str, Any],
    make_engine: MakeEngine,
    twins: dict[str, transformers.PreTrainedModel],
    expected: dict[str, list[list[int]]],
) -> None:
    engine = make_engine(architecture, **setting)
    count = 12 if setting.get("deterministic") else 50
    prompts = random_prompts(50)[:count]
    for prompt, ours, theirs in zip(prompts, run(engine, prompts, GREEDY), expected[architecture], strict=False):
        assert_same(twins[architecture], prompt, ours, theirs)
    assert (engine.stats().preemptions > 0) == (setting.get("num_blocks") == 45)


@pytest.mark.parametrize("architecture", ["qwen2", "mistral", "mixtral", "qwen3-moe"])
def test_greedy_tokens_of_windows_and_experts_equal_transformers(
    architecture: str, make_engine: MakeEngine, twins: dict[str, transformers.PreTrainedModel]
) -> None:
    """Some prompts are longer than the windows; the second run reads the prefix cache, the others chunks, a crowd."""
    prompts = random_prompts(10, shared=True)
    expected = [generate(twins[architecture], prompt) for prompt in prompts]
    chunked = make_engine(architecture, chunk=5, budget=32, num_blocks=60)
    for engine in (chunked, chunked, make_engine(architecture), make_engine(architecture, deterministic=True)):
        for prompt, ours, theirs in zip(prompts, run(engine, prompts, GREEDY), expected, strict=True):
            assert_same(twins[architecture], prompt, ours, theirs)
    assert chunked.stats().prefix_hits > 0


def test_tokens_alone_equal_tokens_together(
    make_engine: MakeEngine, twins: dict[str, Any], expected: dict[str, list[list[int]]]
) -> None:
    engine = make_engine()
    for prompt, theirs in zip(random_prompts(50)[:10], expected["llama"], strict=False):
        assert_same(twins["llama"], prompt, run(engine, [prompt], GREEDY)[0], theirs)


def test_a_second_run_reads_the_prefix_cache_and_says_the_same(make_engine: MakeEngine) -> None:
    engine = make_engine(deterministic=True)
    prompts = random_prompts(6, shared=True)
    first, second = run(engine, prompts, GREEDY), run(engine, prompts, GREEDY)
    stats = engine.stats()
    assert first == second
    assert stats.prefix_queries == 2 * sum(map(len, prompts))
    assert stats.prefix_hits >= sum(len(prompt) - 1 - (len(prompt) - 1) % 4 for prompt in prompts)
    assert stats.owned_blocks == 0


SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=11, max_tokens=12, ignore_eos=True)


def test_the_same_seed_gives_the_same_tokens_whatever_the_batch(make_engine: MakeEngine) -> None:
    prompt = random_prompts(1, seed=3)[0]
    alone = run(make_engine(deterministic=True), [prompt], SAMPLED)[0]
    crowd = make_engine(deterministic=True, chunk=7, budget=24, num_blocks=40)
    for index, other in enumerate(random_prompts(8, seed=4)):
        crowd.add_request(f"other-{index}", other, SamplingParams(seed=index, max_tokens=9, repetition_penalty=1.2))
    crowd.step()
    crowd.add_request("mine", prompt, SAMPLED)
    assert tokens_of(drive(crowd))["mine", 0] == alone


def test_a_continued_prompt_draws_what_the_first_request_would_have_drawn(make_engine: MakeEngine) -> None:
    prompt = random_prompts(1, seed=3)[0]
    engine = make_engine(deterministic=True)
    whole = run(engine, [prompt], SAMPLED)[0]
    rest = run(engine, [prompt + whole[:5]], SamplingParams(**{**vars(SAMPLED), "max_tokens": 7}))[0]
    assert rest == whole[5:]


def test_choices_share_the_prompt_and_differ(make_engine: MakeEngine) -> None:
    prompt = random_prompts(1, seed=5)[0]
    params = SamplingParams(n=4, seed=1, max_tokens=10, ignore_eos=True, temperature=1.5)
    engine = make_engine(deterministic=True)
    engine.add_request("a", prompt, params)
    answers = tokens_of(drive(engine))
    assert sorted(answers) == [("a", choice) for choice in range(4)]
    assert len({tuple(tokens) for tokens in answers.values()}) == 4
    assert engine.stats().prompt_tokens == len(prompt)
    crowded = make_engine(deterministic=True, num_blocks=24, prefix_cache=False)
    crowded.add_request("a", prompt, params)
    assert tokens_of(drive(crowded)) == answers
    assert answers["a", 0] == run(engine, [prompt], SamplingParams(**{**vars(params), "n": 1}))[0]


def test_logprobs_are_those_of_the_raw_logits(make_engine: MakeEngine, twins: dict[str, Any]) -> None:
    prompt = random_prompts(1, seed=6)[0]
    params = SamplingParams(temperature=0.7, seed=2, max_tokens=6, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    engine = make_engine(chunk=8)
    engine.add_request("a", prompt, params)
    engine.add_request("b", prompt, GREEDY)
    deltas = [delta for delta in drive(engine) if delta.request_id == "a"]
    tokens = tokens_of(deltas)["a", 0]
    with torch.inference_mode():
        truth = torch.log_softmax(twins["llama"](torch.tensor([prompt + tokens])).logits[0].float(), -1)
    output = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert deltas[0].prompt_logprobs is not None
    assert deltas[0].prompt_logprobs[0] is None
    entries = [*deltas[0].prompt_logprobs[1:], *output]
    assert len(entries) == len(prompt) + len(tokens) - 1
    for position, entry in enumerate(entries):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(truth[position, (prompt + tokens)[position + 1]]), abs=1e-4)
        chosen = truth[position, (prompt + tokens)[position + 1]]
        near = [int((truth[position] >= chosen + slack).sum()) for slack in (1e-4, -1e-4)]
        assert entry.rank is not None
        assert max(near[0], 1) <= entry.rank <= near[1]
        best = truth[position].topk(len(entry.top))
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert [len(entry.top) for entry in entries if entry] == [2] * (len(prompt) - 1) + [3] * 6


def test_min_tokens_bad_tokens_and_stop_tokens(make_engine: MakeEngine) -> None:
    prompt = random_prompts(1, seed=8)[0]
    engine = make_engine()
    free = run(engine, [prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    stop = free[3]
    first = free.index(stop)
    stopped = run(engine, [prompt], SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(stop,)))[0]
    assert stopped == free[: first + 1]
    kept = run(engine, [prompt], SamplingParams(temperature=0, max_tokens=8, min_tokens=7, stop_token_ids=(stop,)))[0]
    assert len(kept) >= 7
    assert stop not in kept[:7]
    banned = run(engine, [prompt], SamplingParams(temperature=0, max_tokens=8, bad_token_ids=(stop,), ignore_eos=True))
    assert stop not in banned[0]


def test_first_and_last_deltas_carry_the_facts(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request(
        "a", [5] * 9, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), arrival_s=engine.clock()
    )
    deltas = drive(engine)
    assert [delta.facts is None for delta in deltas] == [False, True, False]
    facts = deltas[-1].facts
    assert facts is not None
    assert (facts.prompt_tokens, facts.output_tokens, facts.cached_tokens, facts.preemptions) == (9, 3, 0, 0)
    assert facts.scheduled_s is not None
    assert facts.first_token_s is not None
    assert facts.last_token_s is not None
    assert facts.arrival_s <= facts.scheduled_s <= facts.first_token_s <= facts.last_token_s <= facts.finished_s
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.finished["length"]) == (9, 3, 1)
    waited = Histogram()
    waited.add(facts.scheduled_s - facts.arrival_s)
    assert stats.queue_s == waited.counts


class Faulty:
    """A runner that fails every step with the seat of a request with this first token."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def run(self, step: StepInput) -> StepOutput:
        output = self.runner.run(step)
        if any(int(self.runner.tokens_SL[seat, 0]) == 13 for seat in step.seats):
            raise RuntimeError("thirteen")
        return output


def test_a_bad_request_fails_alone(make_engine: MakeEngine) -> None:
    prompts = random_prompts(7)
    alone = run(make_engine(deterministic=True), prompts, GREEDY)
    engine = make_engine(deterministic=True, wrap=Faulty)
    engine.add_request("bad", [13, 5, 6], SamplingParams(n=2, temperature=0))
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
    deltas = drive(engine)
    answers = tokens_of(deltas)
    assert [answers[str(index), 0] for index in range(7)] == alone
    bad = [delta for delta in deltas if delta.request_id == "bad"]
    assert [
        (delta.choice, delta.finish_reason, delta.error) for delta in sorted(bad, key=lambda delta: delta.choice)
    ] == [
        (0, "error", "RuntimeError: thirteen"),
        (1, "error", "RuntimeError: thirteen"),
    ]
    assert engine.stats().finished["error"] == 2
    assert engine.requests == {}


def test_logits_that_are_not_finite_fail_only_their_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    runner = engine.executor.runner  # type: ignore[attr-defined]
    embed = runner.model.embed
    runner.model.embed = lambda tokens: torch.where(tokens[:, None] == 77, float("nan"), embed(tokens))
    engine.add_request("bad", [5, 77, 6], GREEDY)
    engine.add_request("good", [5, 7, 6], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    deltas = drive(engine)
    engine.add_request("next", [8, 9], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    ends = {delta.request_id: delta for delta in deltas + drive(engine) if delta.finish_reason}
    assert (ends["bad"].finish_reason, ends["bad"].error) == ("error", "the model's logits are not finite")
    assert ends["good"].finish_reason == ends["next"].finish_reason == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_that_is_not_finite_poisons_no_later_owner_of_its_blocks(
    overlap: bool, make_engine: MakeEngine
) -> None:
    engine = make_engine(num_blocks=12, chunk=4, overlap=overlap)
    model = engine.executor.runner.model  # type: ignore[attr-defined]
    embed = model.embed
    model.embed = lambda tokens: torch.where(tokens[:, None] == 77, float("nan"), embed(tokens))
    engine.add_request("bad", [5, 77, *range(8, 23)], GREEDY)  # its first chunks give no logits to judge by
    assert drive(engine)[-1].finish_reason == "error"
    assert engine.stats().cached_blocks == 0
    for number in range(4):  # enough to use every block
        engine.add_request(
            "good", [100 + number, *range(100, 116)], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        )
        assert drive(engine)[-1].finish_reason == "length"


def test_a_rest_without_requests_is_no_hang(make_engine: MakeEngine) -> None:
    now_s = [0.0]
    engine = make_engine(overlap=True)
    engine.clock = lambda: now_s[0]
    now_s[0] = 500.0
    engine.add_request("a", [3, 4], GREEDY)
    engine.step()  # under way: no result has been taken yet
    assert engine.stats().progressed_s == 500.0
    now_s[0] = 700.0
    engine.add_request("b", [3, 4], GREEDY)
    assert engine.stats().progressed_s == 500.0, "a new request does not hide that nothing moves"


class Dead:
    def __init__(self, runner: Runner) -> None:
        pass

    def run(self, step: StepInput) -> StepOutput:
        raise ExecutorLost("rank 1 is gone")


def test_a_lost_executor_is_not_a_request_s_fault(make_engine: MakeEngine) -> None:
    engine = make_engine(wrap=Dead)
    engine.add_request("a", [3], GREEDY)
    with pytest.raises(ExecutorLost, match="rank 1 is gone"):
        engine.step()


def test_abort_frees_blocks_at_any_moment(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk=4, budget=8, seats=4, prefix_cache=False)
    for moment in range(12):
        engine.add_request("a", list(range(3, 20)), SamplingParams(n=2, max_tokens=5, ignore_eos=True))
        engine.add_request("b", list(range(30, 40)), SamplingParams(max_tokens=5))
        for _ in range(moment):
            engine.step()
        ended = [delta.choice for _, delta in engine.abort_request("a")]
        assert ended in ([], [0], [1], [0, 1], [1, 0])
        engine.abort_request("b")
        assert engine.abort_request("a") == []
        assert engine.stats().free_blocks == 1200
        assert not engine.has_unfinished
        assert engine.requests == {}


def test_a_finished_choice_leaves_the_others(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("a", [3, 4, 5], SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=0))
    engine.step()
    engine.finish_choice("a", 0)
    engine.finish_choice("a", 0)
    answers = tokens_of(drive(engine))
    assert list(answers) == [("a", 1)]
    assert engine.stats().finished == {"stop": 1, "length": 1, "abort": 0, "error": 0}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_that_fills_context_and_cache_is_scored_without_output(
    overlap: bool, n: int, make_engine: MakeEngine
) -> None:
    prompt = (random_prompts(1, seed=3)[0] * MAX_LEN)[:MAX_LEN]
    tight = make_engine(num_blocks=MAX_LEN // 4, overlap=overlap)
    tight.add_request("a", prompt, SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=0, n=n, temperature=0))
    deltas = drive(tight)
    assert [(delta.tokens, delta.logprobs, delta.finish_reason) for delta in deltas] == [((), (), "length")] * n
    assert [delta.facts.output_tokens for delta in deltas if delta.facts is not None] == [0] * n

    roomy = make_engine()
    roomy.add_request("a", prompt[:-1], SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0))
    shorter = drive(roomy)[0].prompt_logprobs
    scores = deltas[0].prompt_logprobs
    assert scores is not None
    assert shorter is not None
    assert len(scores) == MAX_LEN
    for ours, theirs in zip(scores[1:], shorter[1:], strict=False):
        assert ours is not None
        assert theirs is not None
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("prompt", "params", "message", "kind"),
    [
        ([], SamplingParams(), "prompt must have at least one token", "invalid"),
        ([VOCAB], SamplingParams(), f"prompt must hold token ids from 0 to {VOCAB - 1}, got {VOCAB}", "invalid"),
        ([-1], SamplingParams(), "got -1", "invalid"),
        ([3] * MAX_LEN, SamplingParams(), f"the prompt has {MAX_LEN} tokens", "too_long"),
        (
            [3] * (MAX_LEN + 1),
            SamplingParams(max_tokens=0),
            f"the prompt has {MAX_LEN + 1} tokens, and at most {MAX_LEN} fit",
            "too_long",
        ),
        (
            [3] * 100,
            SamplingParams(max_tokens=61),
            "100 prompt tokens and max_tokens 61 are more than the 160",
            "too_long",
        ),
        ([3], SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias must be token ids from 0 to", "invalid"),
        ([3], SamplingParams(min_tokens=160), "min_tokens must be at most 159", "invalid"),
        ([3], SamplingParams(n=65), "n must be at most 64", "invalid"),
    ],
)
def test_what_cannot_be_served_is_refused(
    prompt: list[int], params: SamplingParams, message: str, kind: str, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    with pytest.raises(RequestRefused, match=message) as refused:
        engine.add_request("a", prompt, params)
    assert refused.value.kind == kind
    assert engine.stats().refused == {kind: 1}
    assert not engine.has_unfinished


def test_an_id_in_use_is_refused_but_another_front_may_use_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("a", [3], GREEDY, front="one")
    engine.add_request("a", [3], GREEDY, front="two")
    with pytest.raises(RequestRefused, match="request_id 'a' is in use"):
        engine.add_request("a", [3], GREEDY, front="one")
