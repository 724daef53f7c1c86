"""Grammars of free text: with structures in it, or as reasoning before an answer. In llguidance's Lark syntax. Pure.

A trigger of plain text is a lexeme that ends where the trigger first appears, so that no free text goes on behind it. A
trigger that is a special token of the model needs none: free text never has special tokens.

Used by `grammars`.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from stoker.engine.output_grammar import BEGIN_OF_REASONING, END_OF_REASONING, ReasoningPlace
from stoker.engine.structural_tags import StructuralTag, StructuralTags

FREE_TEXT = r"TEXT: /(.|\n)*/"
NO_REASONING = rf" & ~/{BEGIN_OF_REASONING}(.|\n)*/"
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
    rules = [f"start: {_order(tags)}", FREE_TEXT + (NO_REASONING if place == "before" else "")]
    for number, trigger in enumerate(triggers):
        own = [_rest(tag, parts_of, blanks) for tag in tags.tags if tag.trigger == trigger]
        rules += _trigger_rules(number, parts_of(trigger), trigger)
        rules.append(f"tag_{number}: trigger_{number} ({' | '.join(own)})")
    rules.append(f"tag: {' | '.join(f'tag_{number}' for number in range(len(triggers)))}")
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
    if tags.stop_after_first:
        return "tag" if tags.at_least_one else "tag | TEXT"
    return "tag+ TEXT" if tags.at_least_one else "tag* TEXT"


def _trigger_rules(number: int, parts: list[str | int], trigger: str) -> list[str]:
    """The free text up to a trigger, and the trigger."""
    if len(parts) == 1:
        lazy = "" if isinstance(parts[0], int) else "[lazy]"
        return [f"trigger_{number}{lazy}: TEXT {_terminal(parts[0])}"]
    raise ValueError(f"the trigger {trigger!r} must be plain text, or one special token of the model")


def _rest(tag: StructuralTag, parts_of: TextParts, blanks: str) -> str:
    """What follows the trigger."""
    schema = json.loads(tag.schema)
    value = json.dumps({**schema, "x-guidance": {"whitespace_pattern": blanks}})
    begin, end = (_terminals(parts_of(text)) for text in (tag.begin.removeprefix(tag.trigger), tag.end))
    return " ".join((*begin, f"%json {value}", *end))


def _terminals(parts: list[str | int]) -> list[str]:
    return [_terminal(part) for part in parts]


def _terminal(part: str | int) -> str:
    return f"<[{part}]>" if isinstance(part, int) else json.dumps(part)
