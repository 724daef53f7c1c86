"""Structured output: every answer of a random model follows its grammar, however the engine computes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.grammars import GrammarCompiler
from stoker.engine.core.messages import Delta
from stoker.engine.core.token_constraint import packed
from stoker.engine.errors import RequestRefused
from stoker.engine.execution.token_mask import mask_logits
from stoker.engine.http.job_follower import given_up
from stoker.engine.http.openai.allowed_calls import allowed_calls
from stoker.engine.http.openai.tool_parser import FORMATS, LISTED, OutputParser, ReasoningParser, ToolCallParser
from stoker.engine.http.openai.tools import tool_use
from stoker.engine.output_grammar import MAX_GRAMMAR_CHARACTERS, OutputGrammar
from stoker.engine.sampling import SamplingParams
from stoker.engine.structural_tags import StructuralTag, StructuralTags
from stoker.model.tokenizer import BYTE_OF_CHARACTER, Tokenizer
from testing.engine.tiny_tokenizer import EOS, SPECIAL, VOCABULARY, tokenizer_json

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PAIR = {
    "type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}, "required": ["a", "b"],
}  # fmt: skip
PROMPT = list(range(40, 60))
LETTER_A, LETTER_B = (len(SPECIAL) + list(BYTE_OF_CHARACTER).index(letter) for letter in "ab")
Run = dict[tuple[str, int], tuple[list[int], str]]


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(tokenizer_json(), VOCABULARY, (EOS,))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer({"tokenizer.json": tokenizer_json()})


@pytest.fixture
def make(make_engine: Callable[..., LLMEngine], grammars: GrammarCompiler) -> Callable[..., LLMEngine]:
    def made(**options: Any) -> LLMEngine:
        engine = make_engine(**options)
        engine.grammars = grammars
        return engine

    return made


def params(grammar: OutputGrammar | None, seed: int = 1, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "temperature": 1.5, "seed": seed, "grammar": grammar, **more})


def finish(engine: LLMEngine, requests: dict[str, SamplingParams], prompt: list[int] = PROMPT) -> Run:
    """Run all requests to their end: (request, choice) -> tokens and finish reason."""
    for name, one in requests.items():
        engine.add_request(name, prompt, one)
    answers: Run = {}
    while engine.has_unfinished:
        for _, delta in engine.step():
            tokens, reason = answers.get((delta.request_id, delta.choice), ([], ""))
            answers[delta.request_id, delta.choice] = [*tokens, *delta.tokens], delta.finish_reason or reason
            assert delta.error is None, delta.error
    assert not engine.audit().faults
    return answers


def follows(text: str, schema: Any) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": -5, "maximum": 900},
            {"type": "string", "maxLength": 4},
            {"type": "string", "pattern": "^[a-c]{1,3}$"},
            {"enum": ["x", 3, None, "Ünï"]},
            {"const": {"fixed": [1]}},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda item, most: {"type": "array", "items": item, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda items: {"anyOf": items}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda items: {
                "type": "object", "properties": items, "required": list(items), "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["name", "age", "k", 'q"'])  , inner, min_size=1, max_size=3),
        ),
    ),
    max_leaves=5,
)  # fmt: skip


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(schemas=st.lists(SCHEMAS, min_size=3, max_size=5), seed=st.integers(0, 2**31), overlap=st.booleans())
def test_every_answer_is_valid_under_its_schema_or_was_cut_by_its_length(
    make: Callable[..., LLMEngine], tokenizer: Tokenizer, schemas: list[Any], seed: int, overlap: bool
) -> None:
    engine = make(overlap=overlap)
    asked = {f"r{n}": params(OutputGrammar.json_schema(schema), seed + n) for n, schema in enumerate(schemas)}
    for (name, _), (tokens, reason) in finish(engine, asked).items():
        assert reason in ("stop", "length")
        if reason == "stop":
            assert follows(tokenizer.decode(tokens, skip_special_tokens=False), schemas[int(name[1:])])


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        pytest.param(OutputGrammar.regex(r"\d{3}-[a-c]+x"), r"[0-9]{3}-[a-c]+x", id="regex"),
        pytest.param(OutputGrammar.choice(["yes", "no", 'may"be']), 'yes|no|may"be', id="choice"),
        pytest.param(OutputGrammar.grammar('start: "(" start ")" | "a"'), r"\(*a\)*", id="Lark"),
        pytest.param(OutputGrammar.grammar('root ::= "[" item "]"\nitem ::= "a" | "b" item'), r"\[b*a\]", id="GBNF"),
        pytest.param(OutputGrammar.json_schema(PAIR, blanks=""), r'\{"a":(true|false),"b":null\}', id="no blanks"),
        pytest.param(
            OutputGrammar.json_schema(PAIR, blanks=" ?"), r'\{ ?"a" ?: ?(true|false) ?, ?"b" ?: ?null ?\}', id="blanks"
        ),
    ],
)  # fmt: skip
def test_each_kind_of_grammar_is_followed(
    make: Callable[..., LLMEngine], tokenizer: Tokenizer, grammar: OutputGrammar, pattern: str
) -> None:
    asked = {f"r{seed}": params(grammar, seed) for seed in range(6)} | {"greedy": params(grammar, temperature=0.0)}
    answers = finish(make(), asked)
    ended = [tokenizer.decode(tokens) for tokens, reason in answers.values() if reason == "stop"]
    assert ended
    assert all(re.fullmatch(pattern, text) for text in ended), ended


CALL = StructuralTag("<f=", "<f=a>", json.dumps(PAIR), "</f>")
NUMBER = StructuralTag("<f=", "<f=n>", '{"type": "integer"}', "</f>")
MARKED = StructuralTag("<s>", "<s>n", '{"type": "integer"}', "<unk>!")
ONE, PAIRS = "<f=n>7</f>", '<f=a>{"a": true, "b": null}</f>'


@pytest.mark.parametrize(
    ("tags", "whole", "begun", "wrong"),
    [
        pytest.param(
            StructuralTags((CALL, NUMBER)), ["", "text\n<f", f"a{ONE}b{PAIRS}{ONE}"], ["<f=", "<f=n>7"],
            ["<f=b", "<f=n>x", "<f=n>7</g", "<s>"], id="any number",
        ),
        pytest.param(
            StructuralTags((NUMBER,), at_least_one=True), [f"a{ONE}", f"{ONE}b{ONE}"], ["", "abc", "<f=n>7"], ["<f=a"],
            id="at least one",
        ),
        pytest.param(
            StructuralTags((NUMBER,), stop_after_first=True), ["", "a", f"a{ONE}"], ["a<f=n>"], [f"a{ONE}b"],
            id="at most one",
        ),
        pytest.param(
            StructuralTags((NUMBER,), at_least_one=True, stop_after_first=True),
            [f"a{ONE}"], ["", "a"], [f"{ONE}{ONE}"], id="just one",
        ),
        pytest.param(
            StructuralTags((NUMBER, CALL), text_behind=False), ["", "a", f"a{ONE}{PAIRS}"], [f"a{ONE}<f="],
            [f"a{ONE}b", f"{ONE} {ONE}"], id="no text behind",
        ),
        pytest.param(
            StructuralTags((CALL,), stop_after_first=True, bare=True),
            ["", "a{", '{"a": true, "b": null}', f"a{PAIRS}"], ['{"a": true'], ["{}", " {", f'{{"{PAIRS}', '{"b'],
            id="bare",
        ),
        pytest.param(
            StructuralTags((MARKED, CALL)), [f"a<s>n3<unk>!{PAIRS}"], ["a<s>", "<s>n3"], ["a<unk>", "<s>3", "<s>n3!"],
            id="special tokens",
        ),
    ],
)  # fmt: skip
def test_free_text_goes_on_with_a_structure_behind_its_trigger(
    grammars: GrammarCompiler, tokenizer: Tokenizer, tags: StructuralTags, whole: list[str], begun: list[str],
    wrong: list[str],
) -> None:  # fmt: skip
    def read(text: str) -> str:
        matcher = grammars.compile(OutputGrammar.structural_tags(tags)).deep_copy()
        taken = all(matcher.consume_token(token) for token in tokenizer.encode(text, add_special_tokens=False))
        return "wrong" if not taken else "whole" if matcher.is_accepting() else "begun"

    for expected, texts in (("whole", whole), ("begun", begun), ("wrong", wrong)):
        assert {text: read(text) for text in texts} == dict.fromkeys(texts, expected)


def test_free_text_does_not_spell_a_trigger_that_is_a_special_token(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    def read(text: str) -> bool:
        matcher = grammars.compile(OutputGrammar.structural_tags(StructuralTags((MARKED,)))).deep_copy()
        tokens = [token for character in text for token in tokenizer.encode(character, add_special_tokens=False)]
        assert tokenizer.decode(tokens) == text
        return all(matcher.consume_token(token) for token in tokens)

    assert [read(text) for text in ("a<s", "a<s>", "<<s>n3", "a<unk>")] == [True, False, False, True]


TOOLS = [
    {"type": "function", "function": {"name": "ab", "parameters": {"properties": {"x": {"type": "boolean"}}}}},
    {"type": "function", "function": {"name": "a"}},
    {"type": "function", "function": {"name": "abc"}},
]
SOME_ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS[:2]}}
FORMS = [("hermes", ""), ("llama3_json", ""), ("mistral", ""), ("mistral", "[ARGS]")]
ARGUMENTS = ["{}", '{"x": true}', '{"y": 1}']
CALLS = [
    f'{{"name": "{name}", "{key}": {value}}}'
    for name in ("ab", "a", "abc") for key in ("arguments", "parameters") for value in ARGUMENTS
]  # fmt: skip
PIECES = [
    *CALLS, *ARGUMENTS, "<tool_call>", "<tool_call>\n", "\n</tool_call>", "[TOOL_CALLS]", "[", "]", ", ", "; ", " ",
    "\n",
    "<|python_tag|>", "[TOOL_CALLS]a[ARGS]", "[TOOL_CALLS]abc[ARGS]", "[TOOL_CALLS]ab", "[ARGS]", "hm", "{", "</think>",
]  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    form=st.sampled_from(FORMS), parallel=st.booleans(), place=st.sampled_from(["none", "before", "begun"]),
    begin=st.sampled_from(["", "<think>", " <think>"]), pieces=st.lists(st.sampled_from(PIECES), max_size=6),
)  # fmt: skip
def test_no_text_that_follows_the_grammar_has_a_call_that_is_not_allowed(
    grammars: GrammarCompiler, tokenizer: Tokenizer, form: Any, parallel: bool, place: Any, begin: str,
    pieces: list[str],
) -> None:  # fmt: skip
    use = tool_use(TOOLS, SOME_ALLOWED, parallel)
    matcher = grammars.compile(replace(allowed_calls(use, *form), reasoning=place)).deep_copy()
    text = begin + "".join(pieces)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    taken = next((n for n, token in enumerate(tokens) if not matcher.consume_token(token)), len(tokens))
    reasoning = ReasoningParser(begun=place == "begun") if place != "none" else None
    parser = OutputParser(reasoning, ToolCallParser(FORMATS[form[0]]))
    parts = [*parser.add(tokenizer.decode(tokens[:taken])), *parser.finish()]
    called = [part.text for part in parts if part.kind == "call"]
    assert set(called) <= {"a", "ab"}
    assert len(called) <= 1 or parallel


@pytest.mark.parametrize(
    ("form", "template", "answer", "called"),
    [
        pytest.param("hermes", "", f"hm\n<tool_call>\n{CALLS[1]}\n</tool_call>", ["ab"], id="hermes"),
        pytest.param("hermes", "", f"<tool_call>\n{CALLS[6]}\n</tool_call>" * 2, ["a", "a"], id="hermes, two"),
        pytest.param("llama3_json", "", CALLS[4], ["ab"], id="llama"),
        pytest.param("llama3_json", "", f"hm<|python_tag|>{CALLS[9]}", ["a"], id="llama, behind a text"),
        pytest.param("mistral", "", f"hm[TOOL_CALLS][{CALLS[0]}, {CALLS[6]}]", ["ab", "a"], id="mistral"),
        pytest.param("mistral", "[ARGS]", "[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]ab[ARGS]{}", ["a", "ab"], id="by name"),
        pytest.param("hermes", "", "No {call} at all.", [], id="text"),
    ],
)
def test_allowed_calls_are_written_in_the_models_own_form(
    grammars: GrammarCompiler, tokenizer: Tokenizer, form: Any, template: str, answer: str, called: list[str]
) -> None:
    matcher = grammars.compile(allowed_calls(tool_use(TOOLS, SOME_ALLOWED, True), form, template)).deep_copy()
    assert all(matcher.consume_token(token) for token in tokenizer.encode(answer, add_special_tokens=False))
    assert matcher.is_accepting()
    parser = ToolCallParser(FORMATS[form])
    parts = [*parser.add(answer), *parser.finish()]
    assert [part.text for part in parts if part.kind == "call"] == called


@pytest.mark.parametrize(
    ("grammar", "answer"),
    [
        pytest.param(OutputGrammar.json_schema(PAIR), '{"a": true, "b": null}', id="schema"),
        pytest.param(OutputGrammar.regex("[a-z]+"), "abc", id="regex"),
        pytest.param(OutputGrammar.choice(["yes", "no"]), "no", id="choice"),
        pytest.param(OutputGrammar.grammar('start: "x" start | "y"'), "xxy", id="grammar"),
        pytest.param(OutputGrammar.structural_tags(StructuralTags((NUMBER,), True, True)), f"a{ONE}", id="tags"),
    ],
)
def test_reasoning_may_come_before_what_follows_a_grammar(
    grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: OutputGrammar, answer: str
) -> None:
    def read(place: Any, text: str) -> str:
        matcher = grammars.compile(replace(grammar, reasoning=place)).deep_copy()
        taken = all(matcher.consume_token(token) for token in tokenizer.encode(text, add_special_tokens=False))
        return "wrong" if not taken else "whole" if matcher.is_accepting() else "begun"

    thought = 'hm, {"a": 1} <f=\n</think>'
    assert read("none", answer) == "whole"
    for text, place, found in (
        (answer, "before", "whole"),
        (f"<think>{thought}\n\n{answer}", "before", "whole"),
        ("<think>hm", "before", "begun"),
        (f"{thought}{answer}", "begun", "whole"),
        (thought, "begun", "begun"),
        (f"{thought}\n<s>", "begun", "wrong"),
    ):
        assert read(place, text) == found, (place, text)


def crowd() -> dict[str, SamplingParams]:
    """Constrained and free requests with everything that touches sampling."""
    person = OutputGrammar.json_schema(PERSON)
    return {
        "plain": params(person, 3),
        "greedy": params(person, 4, temperature=0.0),
        "three": params(person, 5, n=3, logprobs=2),
        "filtered": params(person, 6, top_p=0.7, top_k=20, frequency_penalty=0.4),
        "long": params(OutputGrammar.regex("[ab]*"), 7, min_tokens=9, max_tokens=30),
        "words": params(None, 8, bad_sequences=((70, 71), (72,)), max_tokens=20),
        "listed": params(None, 9, allowed_token_ids=(50, 51, 52), max_tokens=20),
        "free": params(None, 10, max_tokens=40),
        "free greedy": params(None, 11, temperature=0.0, max_tokens=40),
    }


def test_answers_are_the_same_with_overlap_chunks_preemption_and_a_cached_prefix(
    make: Callable[..., LLMEngine],
) -> None:
    expected = finish(make(), crowd())
    tight = make(num_blocks=45, seats=8)
    assert finish(make(overlap=True), crowd()) == expected
    assert finish(make(chunk=3, budget=12, seats=12), crowd()) == expected
    assert finish(tight, crowd()) == expected
    assert tight.stats().preemptions > 0
    again = make(overlap=True)
    assert finish(again, crowd()) == finish(again, crowd()) == expected
    assert again.stats().prefix_hits > 0


def test_a_mask_binds_its_own_row_alone() -> None:
    logits = torch.randn(4, VOCABULARY)
    bits = {2: packed([5, 300], VOCABULARY).tobytes(), 7: packed(range(VOCABULARY), VOCABULARY).tobytes()}
    masked = mask_logits(logits, np.array([2, 3, 7, 9]), bits)
    assert masked[0].isfinite().nonzero().flatten().tolist() == [5, 300]
    assert torch.equal(masked[1:], logits[1:])


def test_raw_logprobs_are_those_before_the_mask(make: Callable[..., LLMEngine]) -> None:
    engine = make()
    engine.add_request("r", PROMPT, params(OutputGrammar.choice(["yes"]), logprobs=3))
    scores = [score for _, delta in engine.step() for score in delta.logprobs or ()]
    assert scores[0].logprob <= scores[0].top[-1][1] or scores[0].logprob in [value for _, value in scores[0].top]
    assert scores[0].logprob < -0.5  # one of 320 tokens of a random model, although it was the only one allowed


def test_bad_words_and_allowed_tokens_bind(make: Callable[..., LLMEngine]) -> None:
    engine = make(overlap=True)
    free = finish(engine, {"r": params(None, 8, max_tokens=30, ignore_eos=True)})["r", 0][0]
    pair = (free[3], free[4])
    wary = params(None, 8, max_tokens=30, ignore_eos=True, bad_sequences=(pair,))
    words = finish(engine, {"r": wary})["r", 0][0]
    assert words[:4] == free[:4]
    assert pair not in pairwise(words)
    listed = finish(engine, {"r": params(None, 8, max_tokens=30, allowed_token_ids=(9, 99))})["r", 0]
    assert set(listed[0]) == {9, 99}
    assert listed[1] == "length"


def test_ignore_eos_goes_on_while_the_grammar_can(make: Callable[..., LLMEngine]) -> None:
    grammar = OutputGrammar.regex("[ab]{2,12}")
    tokens, reason = finish(make(), {"r": params(grammar, ignore_eos=True)})["r", 0]
    assert (len(tokens), reason) == (12, "stop")


def test_what_leaves_no_token_fails_alone_with_the_reason(make: Callable[..., LLMEngine]) -> None:
    """The only tokens are 9 and the end token; 9 may not come twice, and nothing may end before two tokens."""
    engine = make()
    (eos,) = engine.limits.eos_token_ids
    listed: dict[str, Any] = {"allowed_token_ids": (9, eos), "bad_sequences": ((9, 9),)}
    engine.add_request("none", PROMPT, params(None, min_tokens=2, **listed))
    engine.add_request("ends", PROMPT, params(None, min_tokens=1, **listed))
    engine.add_request("free", PROMPT, params(None, max_tokens=5))
    ends: dict[str, tuple[str, str | None]] = {}
    while engine.has_unfinished:
        ends |= {d.request_id: (d.finish_reason, d.error) for _, d in engine.step() if d.finish_reason}
    reason = "no token is left that allowed_token_ids and bad_words and min_tokens allow together"
    assert ends == {"none": ("error", reason), "ends": ("stop", None), "free": ("length", None)}


@pytest.mark.parametrize(
    ("shape", "field", "reason"),
    [
        pytest.param(
            {
                "grammar": OutputGrammar.regex("((a{1,100}){1,100}){1,100}", "structured_outputs.regex"),
                "allowed_token_ids": (LETTER_A,),
            },
            "structured_outputs.regex", "too complex", id="complex",
        ),
        pytest.param(
            {"grammar": OutputGrammar.choice(["ab"], "guided_choice"), "bad_token_ids": (LETTER_B,)},
            "guided_choice", "guided_choice and bad_token_ids", id="dead end",
        ),
        pytest.param(
            {"allowed_token_ids": (9,), "bad_sequences": ((9, 9),)}, "bad_words", "allowed_token_ids", id="no grammar"
        ),
    ],
)  # fmt: skip
def test_an_answer_that_its_own_fields_stop_is_refused_by_their_name(
    make: Callable[..., LLMEngine], shape: dict[str, Any], field: str, reason: str
) -> None:
    """Clients must not take it for a fault of the server and repeat it."""
    engine = make()
    engine.add_request("r", PROMPT, replace(params(None), **shape))
    last: list[Delta] = []
    while engine.has_unfinished:
        last += [delta for _, delta in engine.step() if delta.finish_reason]
    refused = given_up(last[0])
    assert (refused.status, refused.param, refused.code) == (400, field, "invalid_value")
    assert refused.message.startswith(f"{field}: the answer cannot go on: ")
    assert reason in refused.message


@pytest.mark.parametrize(
    ("grammar", "fields", "field"),
    [
        pytest.param(None, {"allowed_token_ids": (9,), "bad_token_ids": (9,)}, "bad_token_ids", id="bad tokens"),
        pytest.param(None, {"allowed_token_ids": (EOS,), "min_tokens": 1}, "min_tokens", id="end token"),
        pytest.param(OutputGrammar.choice(["yes"]), {"allowed_token_ids": (9,)}, "allowed_token_ids", id="grammar"),
        pytest.param(None, {"allowed_token_ids": (9,), "bad_sequences": ((9,),)}, "bad_words", id="bad words"),
    ],
)
def test_fields_that_leave_no_first_token_are_refused(
    make: Callable[..., LLMEngine], grammar: OutputGrammar | None, fields: dict[str, Any], field: str
) -> None:
    engine = make()
    with pytest.raises(RequestRefused, match=f"no token is left that .*{field} allow together") as refused:
        engine.add_request("r", PROMPT, params(grammar, **fields))
    assert (refused.value.kind, refused.value.field) == ("invalid", field)


BAD = {
    "unknown type": (lambda: OutputGrammar.json_schema({"type": "person"}), "Invalid type"),
    "not supported": (lambda: OutputGrammar.json_schema({"not": {}}), "Unimplemented keys"),
    "never true": (lambda: OutputGrammar.json_schema({"enum": []}), "Unsatisfiable"),
    "reference to itself": (lambda: OutputGrammar.json_schema({"$ref": "#"}), "no text satisfies it"),
    "overlapping oneOf": (
        lambda: OutputGrammar.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        "oneOf is possible only where its parts exclude each other",
    ),
    "address of another host": (lambda: OutputGrammar.json_schema({"$ref": "http://h/x"}), "retriev"),
    "regex": (lambda: OutputGrammar.regex("(a"), "unclosed group"),
    "look-around": (lambda: OutputGrammar.regex("a(?=b)"), "look-around"),
    "grammar": (lambda: OutputGrammar.grammar("start: missing"), "missing"),
    "no rule": (lambda: OutputGrammar.grammar("::= ::="), "cannot be used"),
    "no choice": (lambda: OutputGrammar.choice([]), "1 to 1024"),
    "empty": (lambda: OutputGrammar.regex(" "), "empty"),
    "no JSON": (lambda: OutputGrammar.json_schema("{"), "must be JSON"),
    "no schema": (lambda: OutputGrammar.json_schema("3"), "JSON schema"),
    "false": (lambda: OutputGrammar.json_schema(False), "must allow a value, got false"),
    "too large": (lambda: OutputGrammar.regex("a" * (MAX_GRAMMAR_CHARACTERS + 1)), "at most"),
    "place of reasoning": (lambda: replace(OutputGrammar.json_object(), reasoning="behind"), "none, before, begun"),  # type: ignore[arg-type]
    "blanks": (lambda: OutputGrammar.json_object(blanks="("), "(with blanks of '('): regex parse error"),
    "trigger in parts": (
        lambda: OutputGrammar.structural_tags(StructuralTags((StructuralTag("<s>a", "<s>a", "true", ""),))),
        "the trigger '<s>a' must be plain text, or one special token",
    ),
    "begin without trigger": (
        lambda: OutputGrammar.structural_tags(StructuralTags((StructuralTag("a", "b", "true", ""),))),
        "begin must start with its trigger, got 'b' with 'a'",
    ),
    "no tags": (lambda: OutputGrammar.structural_tags(StructuralTags(())), "1 to 128 tags, got 0"),
    "long end": (
        lambda: OutputGrammar.structural_tags(StructuralTags((StructuralTag("a", "a", "true", "x" * 1001),))),
        "end must have at most 1000 characters",
    ),
    "schema of a tag": (
        lambda: OutputGrammar.structural_tags(StructuralTags((StructuralTag("a", "a", '{"type": "x"}', ""),))),
        "Invalid type",
    ),
    "too deep": (lambda: OutputGrammar.json_schema(nested(70)), "at most 64"),
}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("schema", [True, "true"])
def test_the_schema_true_allows_any_value(grammars: GrammarCompiler, schema: bool | str) -> None:
    made = OutputGrammar.json_schema(schema)
    assert made == OutputGrammar.json_schema({})
    grammars.compile(made)


@pytest.mark.parametrize(("make_grammar", "reason"), BAD.values(), ids=BAD)
def test_a_grammar_that_cannot_be_used_is_refused_with_its_reason(
    grammars: GrammarCompiler, make_grammar: Callable[[], OutputGrammar], reason: str
) -> None:
    with pytest.raises(RequestRefused, match=re.escape(reason)) as refused:
        grammars.compile(make_grammar())
    assert (refused.value.kind, refused.value.field) == ("invalid", "grammar")


def test_an_engine_without_a_tokenizer_refuses_grammars(make_engine: Callable[..., LLMEngine]) -> None:
    engine = make_engine()
    with pytest.raises(RequestRefused, match="structured output"):
        engine.add_request("r", PROMPT, params(OutputGrammar.json_object()))
    assert not engine.requests


def test_compiled_grammars_are_kept_and_not_changed_by_their_requests(
    make: Callable[..., LLMEngine], grammars: GrammarCompiler
) -> None:
    grammar = OutputGrammar.choice(["yes", "no"])
    first = finish(make(), {"r": params(grammar, 5)})
    assert grammars.knows(grammar)
    kept = grammars.compile(grammar)
    assert finish(make(), {"r": params(grammar, 5)}) == first
    assert grammars.compile(grammar) is kept
    assert not kept.is_stopped()


def test_required_calls_follow_their_functions_schemas(make: Callable[..., LLMEngine], tokenizer: Tokenizer) -> None:
    tools = [
        {"type": "function", "function": {"name": "pet", "parameters": {
            "$id": "https://pets/kind", "$defs": {"kind": {"enum": ["cat", "dog"]}},
            "properties": {"kind": {"$ref": "#/$defs/kind"}}, "required": ["kind"], "additionalProperties": False}}},
        {"type": "function", "function": {"name": "stop"}},
    ]  # fmt: skip
    use = tool_use(tools, "required", False)
    assert use.grammar is not None
    blank = {token: -100.0 for token in range(3, VOCABULARY) if not tokenizer.decode([token]).strip()}
    asked = {f"r{seed}": params(use.grammar, seed, logit_bias=blank) for seed in range(5)}
    for tokens, reason in finish(make(), asked).values():
        assert reason == "stop"
        text = tokenizer.decode(tokens)
        assert follows(text, json.loads(use.grammar.text))
        parser = ToolCallParser(LISTED, forced=True)
        begin, arguments = [*parser.add(text), *parser.finish()]
        assert (begin.text, json.loads(arguments.text)) in [
            ("stop", {}), ("pet", {"kind": "cat"}), ("pet", {"kind": "dog"}),
        ]  # fmt: skip
