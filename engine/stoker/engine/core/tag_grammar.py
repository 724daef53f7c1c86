"""Grammars of free text: with structures in it, or as reasoning before an answer. In llguidance's Lark syntax. Pure.

A trigger of plain text is a lexeme that ends where the trigger first appears, so that no free text goes on behind it. A
trigger that is a special token of the model needs none: free text never has special tokens.

Used by `grammars`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from stoker.engine.output_grammar import BEGIN_OF_REASONING, END_OF_REASONING, ReasoningPlace
from stoker.engine.structural_tags import StructuralTag, StructuralTags

FREE_TEXT = r"TEXT: /(.|\n)*/"
SPACES = r"[\s\x1c-\x1f]*"
"""Blanks that a parser of the answer skips at its begin."""
BLANKS = r"BLANKS: /[ \n]{1,8}/"

TextParts = Callable[[str], list[str | int]]
"""Cuts a text into runs of plain text and the ids of special tokens."""


def tag_grammar(tags: StructuralTags, parts_of: TextParts, blanks: str, place: ReasoningPlace) -> str:
    """Return the grammar.

    Args:
        tags: the structures.
        parts_of: cuts texts by the model's special tokens.
        blanks: a regular expression of what may stand between two parts of a JSON value.
        place: of reasoning; where it may come before the answer, it is no free text, whose triggers would count.

    Raises:
        ValueError: a trigger is neither plain text nor one special token.
    """
    triggers = list(dict.fromkeys(tag.trigger for tag in tags.tags))
    rules = [f"start: {_order(tags)}", FREE_TEXT + "".join(_exceptions(tags, triggers, parts_of, place))]
    for number, trigger in enumerate(triggers):
        own = [_rest(tag, parts_of, blanks) for tag in tags.tags if tag.trigger == trigger]
        rules += _trigger_rules(number, parts_of(trigger), trigger)
        rules.append(f"tag_{number}: trigger_{number} ({' | '.join(own)})")
        if not tags.text_behind:
            rules.append(f"next_{number}: {' '.join(_terminals(parts_of(trigger)))} ({' | '.join(own)})")
    for name in ("tag", *(() if tags.text_behind else ("next",))):
        rules.append(f"{name}: {' | '.join(f'{name}_{number}' for number in range(len(triggers)))}")
    if tags.bare:
        rules.append(f"bare: {' | '.join(_value(tag, blanks) for tag in tags.tags)}")
    return "\n".join(rules) + "\n"


def answer_behind_reasoning(place: ReasoningPlace, parts_of: TextParts) -> str:
    """Return the grammar of an output whose reasoning may come before, or goes on before, the grammar `answer`."""
    begin = " ".join(_terminals(parts_of(BEGIN_OF_REASONING)))
    end = parts_of(END_OF_REASONING)
    lazy = "" if isinstance(end[0], int) else "[lazy]"
    thought = f"thought{lazy}: TEXT {' '.join(_terminals(end))}"
    start = "thought BLANKS?" if place == "begun" else f"({begin} thought BLANKS?)?"
    return "\n".join((f"start: {start} @answer", thought, FREE_TEXT, BLANKS)) + "\n"


def _order(tags: StructuralTags) -> str:
    some = "tag" if tags.stop_after_first else "tag next*" if not tags.text_behind else "tag+ TEXT"
    either = [some, *(["bare"] if tags.bare else []), *([] if tags.at_least_one else ["TEXT"])]
    return " | ".join(either)


def _exceptions(tags: StructuralTags, triggers: list[str], parts_of: TextParts, place: ReasoningPlace) -> Iterator[str]:
    """What free text may not be. Plain tokens may spell a special one, and a reader could not tell them apart."""
    if place == "before":
        yield rf" & ~/{SPACES}{BEGIN_OF_REASONING}(.|\n)*/"
    if tags.bare:
        yield rf" & ~/{SPACES}\{{(.|\n)*/"
    for trigger in triggers:
        if not isinstance(parts_of(trigger)[0], str):
            yield rf" & ~/(.|\n)*{_literal(trigger)}(.|\n)*/"


def _literal(text: str) -> str:
    """A regular expression of just this text."""
    return "".join(rf"\x{{{ord(character):x}}}" for character in text)


def _trigger_rules(number: int, parts: list[str | int], trigger: str) -> list[str]:
    """The free text up to a trigger, and the trigger."""
    if len(parts) == 1:
        lazy = "" if isinstance(parts[0], int) else "[lazy]"
        return [f"trigger_{number}{lazy}: TEXT {_terminal(parts[0])}"]
    raise ValueError(f"the trigger {trigger!r} must be plain text, or one special token of the model")


def _rest(tag: StructuralTag, parts_of: TextParts, blanks: str) -> str:
    """What follows the trigger."""
    begin, end = (_terminals(parts_of(text)) for text in (tag.begin.removeprefix(tag.trigger), tag.end))
    return " ".join((*begin, _value(tag, blanks), *end))


def _value(tag: StructuralTag, blanks: str) -> str:
    return f"%json {json.dumps({**json.loads(tag.schema), 'x-guidance': {'whitespace_pattern': blanks}})}"


def _terminals(parts: list[str | int]) -> list[str]:
    return [_terminal(part) for part in parts]


def _terminal(part: str | int) -> str:
    return f"<[{part}]>" if isinstance(part, int) else json.dumps(part)
