"""The engine in a script: texts or token ids in, answers in the same order out."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from stoker.engine.config import CacheConfig, EngineConfig, SchedulerConfig, ServedModelConfig
from stoker.engine.errors import EngineClosed, RequestRefused
from stoker.engine.llm import LLM, Generated, Prompt
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.sampling import SamplingParams


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[LLM]:
    config = EngineConfig(
        model=ServedModelConfig(path=str(model_folder), dtype="float32"),
        deterministic=True,
        cache=CacheConfig(num_blocks=60),
        scheduler=SchedulerConfig(max_batch_tokens=64, max_requests=4, max_queued_requests=2),
    )
    with LLM(config) as llm:
        yield llm


def only(answers: list[Generated]) -> Generated:
    (answer,) = answers
    return answer


GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, bad_token_ids=tuple(range(259, 320)))


def test_answers_come_in_the_order_of_more_prompts_than_the_queue_takes(llm: LLM) -> None:
    prompts = [f"prompt {number} " * (number % 3 + 1) for number in range(9)]
    together = llm.generate(prompts, GREEDY, progress=False)
    alone = [only(llm.generate(prompt, GREEDY, progress=False)) for prompt in prompts]
    assert [answer.completions[0].tokens for answer in together] == [answer.completions[0].tokens for answer in alone]
    assert [answer.prompt_tokens for answer in together] == [tuple(llm.tokenizer.encode(prompt)) for prompt in prompts]
    completion = together[0].completions[0]
    assert (len(completion.tokens), completion.finish_reason) == (10, "length")
    assert completion.text == llm.tokenizer.decode(completion.tokens)


def test_text_goes_on_where_the_prompt_ends(twins: dict[str, Any], tmp_path: Path) -> None:
    twins["llama"].save_pretrained(tmp_path)
    words = {f"\u2581w{number}": number for number in range(320)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "\u2581w0"))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = EngineConfig(
        model=ServedModelConfig(path=str(tmp_path)), threads=torch.get_num_threads(), cache=CacheConfig(num_blocks=60)
    )
    with LLM(config) as llm:
        completion = only(
            llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=3), progress=False)
        ).completions[0]
    assert completion.text == "".join(f" w{token}" for token in completion.tokens)


def test_token_ids_are_a_prompt_too(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("hello")
    assert llm.generate([tokens], GREEDY, progress=False) != []
    assert only(llm.generate(tokens, GREEDY, progress=False)).prompt_tokens == tuple(tokens)


def test_a_stop_text_ends_a_choice_before_it(llm: LLM) -> None:
    whole = only(llm.generate("hello", GREEDY, progress=False)).completions[0].text
    stop = whole[4]
    cut = only(llm.generate("hello", SamplingParams(**{**vars(GREEDY), "stop": (stop,)}), progress=False))
    completion = cut.completions[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == whole[: whole.index(stop)]
    assert not llm.engine.has_unfinished


def test_a_stop_token_is_the_reason_and_an_exhausted_limit_has_none(llm: LLM) -> None:
    whole = only(llm.generate("hello", GREEDY, progress=False)).completions[0]
    assert (whole.finish_reason, whole.stop_reason) == ("length", None)
    ended = SamplingParams(**{**vars(GREEDY), "stop_token_ids": (whole.tokens[2],)})
    completion = only(llm.generate("hello", ended, progress=False)).completions[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", whole.tokens[2])


def test_a_prompt_is_scored_without_output(llm: LLM) -> None:
    answer = only(llm.generate("hello", SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=1), progress=False))
    completion = answer.completions[0]
    assert (completion.text, completion.tokens, completion.logprobs) == ("", [], [])
    assert completion.finish_reason == "length"
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == len(answer.prompt_tokens)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [GREEDY, SamplingParams(n=3, seed=1, max_tokens=4, logprobs=1, prompt_logprobs=0, ignore_eos=True)]
    one, three = llm.generate(["ab", "cd"], params, progress=False)
    assert (len(one.completions), len(three.completions)) == (1, 3)
    assert one.prompt_logprobs is None
    assert three.prompt_logprobs is not None
    assert len(three.prompt_logprobs) == 2
    for completion in three.completions:
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.tokens) == 4
        assert completion.cumulative_logprob == pytest.approx(sum(one.logprob for one in completion.logprobs))
    assert one.completions[0].cumulative_logprob is None
    with pytest.raises(ValueError, match="one for each of 2 prompts, got 1"):
        llm.generate(["ab", "cd"], [GREEDY])


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        pytest.param(None, GREEDY, "prompts must be texts or lists of token ids, got None", id="no prompts"),
        pytest.param({"prompt": "hi"}, GREEDY, "token ids, got {'prompt': 'hi'}", id="mapping"),
        pytest.param([{"prompt": "hi"}], GREEDY, r"token ids, got \[{'prompt': 'hi'}\]", id="mappings"),
        pytest.param(b"hi", GREEDY, "token ids, got b'hi'", id="bytes"),
        pytest.param({"a", "b"}, GREEDY, "token ids, got {'", id="no order"),
        pytest.param([[1, 2], [1.5]], GREEDY, r"token ids, got \[1.5\]", id="fractions"),
        pytest.param([["a", "b"]], GREEDY, r"token ids, got \['a', 'b'\]", id="texts as tokens"),
        pytest.param([None], GREEDY, r"prompts must .* got \[None\]", id="no prompt"),
        pytest.param(1.5, GREEDY, "prompts must .* got 1.5", id="a number"),
        pytest.param(["ab"], {"n": 1}, "params must be SamplingParams, got str", id="a dictionary"),
        pytest.param(["ab"], "x", "params must be SamplingParams, got str", id="a text"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        llm.generate(prompts, params, progress=False)
    assert not llm.engine.has_unfinished


def test_an_empty_list_of_parameters_is_not_the_default(llm: LLM) -> None:
    with pytest.raises(ValueError, match="one for each of 1 prompts, got 0"):
        llm.generate(["ab"], [], progress=False)


def test_an_answer_follows_its_grammar(llm: LLM) -> None:
    params = [
        SamplingParams(seed=2, max_tokens=40, grammar=OutputGrammar.json_schema({"enum": ["yes", "no"]})),
        SamplingParams(seed=2, max_tokens=40, grammar=OutputGrammar.regex("[0-9]{2,4}")),
    ]
    one, two = (answer.completions[0] for answer in llm.generate(["ab", "cd"], params, progress=False))
    assert json.loads(one.text) in ("yes", "no")
    assert two.text.isdecimal()
    assert 2 <= len(two.text) <= 4
    with pytest.raises(RequestRefused, match="grammar cannot be used"):
        llm.generate("ab", SamplingParams(grammar=OutputGrammar.regex("(")), progress=False)
    assert not llm.engine.has_unfinished


def test_a_closed_engine_says_so_and_holds_no_weights(model_folder: Path) -> None:
    closed = LLM(EngineConfig(model=ServedModelConfig(path=str(model_folder)), cache=CacheConfig(num_blocks=60)))
    engine = weakref.ref(closed.engine)
    closed.close()
    closed.close()
    gc.collect()
    assert engine() is None
    for use in (
        lambda: closed.generate([], progress=False),
        lambda: closed.beam_search([5, 6], width=2, max_tokens=2),
        closed.__enter__,
    ):
        with pytest.raises(EngineClosed, match="is closed: make a new LLM"):
            use()


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    prompts: list[Prompt] = ["short", [5] * 400]
    with pytest.raises(RequestRefused, match="the prompt has 400 tokens"):
        llm.generate(prompts, GREEDY, progress=False)
    assert not llm.engine.has_unfinished
    assert llm.engine.stats().owned_blocks == 0


def test_a_beam_search_finds_what_transformers_finds(llm: LLM, twins: dict[str, Any]) -> None:
    prompts = [[5, 9, 40], [7] * 20]
    found = llm.beam_search(prompts, width=3, max_tokens=8, ignore_eos=True)
    for prompt, answer in zip(prompts, found, strict=True):
        with torch.no_grad():
            expected = twins["llama"].generate(
                torch.tensor([prompt]), num_beams=3, num_return_sequences=3, max_new_tokens=8, do_sample=False,
                length_penalty=1.0, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        assert [one.tokens for one in answer.completions] == [row[len(prompt) :].tolist() for row in expected]
        totals = [one.cumulative_logprob for one in answer.completions]
        assert totals == sorted(totals, reverse=True)  # type: ignore[type-var]
        assert {one.finish_reason for one in answer.completions} == {"length"}
    one = only(llm.beam_search("hello", width=1, max_tokens=6, ignore_eos=True)).completions[0]
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    assert one.text == only(llm.generate("hello", greedy, progress=False)).completions[0].text
    for width, limit, penalty, message in (
        (0, 4, 1.0, "width must be"),
        (65, 4, 1.0, "width must be"),
        (1.5, 4, 1.0, "width must be .* got 1.5, 4"),
        (2, 0, 1.0, "max_tokens"),
        (2, 900, 1.0, "fit"),
        (2, 4, float("nan"), "length_penalty must be from -10 to 10, got nan"),
        (2, 4, -1e300, "length_penalty must be from -10 to 10, got -1e"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.beam_search("hello", width=width, max_tokens=limit, length_penalty=penalty)  # type: ignore[arg-type]


def test_an_engine_computes_with_its_own_threads_beside_others_of_the_process(llm: LLM, model_folder: Path) -> None:
    """`deterministic` needs one thread, whatever a second engine or the script has set since."""
    other = EngineConfig(
        model=ServedModelConfig(path=str(model_folder), dtype="float32"), cache=CacheConfig(num_blocks=60), threads=2
    )
    used: list[int] = []
    before = torch.get_num_threads()
    try:
        with LLM(other) as second:
            for each in (llm, second, llm):
                each.generate("x", GREEDY, progress=lambda *_: used.append(torch.get_num_threads()))
        torch.set_num_threads(3)
        llm.generate("x", GREEDY, progress=lambda *_: used.append(torch.get_num_threads()))
        assert torch.get_num_threads() == 3, "the script's own number is left alone"
    finally:
        torch.set_num_threads(before)
    steps = len(used) // 4
    assert used == [1] * steps + [2] * steps + [1] * 2 * steps


def test_unfinished_requests_are_counted(llm: LLM) -> None:
    for number in range(2):
        llm.engine.add_request(f"r{number}", [3, 4], SamplingParams(n=2, max_tokens=number + 1, ignore_eos=True))
    counts = [llm.engine.num_unfinished]
    while llm.engine.has_unfinished:
        llm.engine.step()
        counts.append(llm.engine.num_unfinished)
    assert (counts[0], counts[-1]) == (2, 0)
    assert sorted(counts, reverse=True) == counts


def test_progress_may_be_a_function(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    llm.generate(["a", "b"], GREEDY, progress=lambda num_done, num_tokens: seen.append((num_done, num_tokens)))
    assert seen == sorted(seen)
    assert seen[-1] == (2, 20)


def test_the_bar_shows_prompts_and_throughput(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "Generating" in shown
    assert "2/2" in shown
    assert "tokens/s" in shown
