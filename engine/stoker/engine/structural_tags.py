"""Structures inside free text: where the text comes to a trigger, one of its tags follows as a whole. A checked value.

A front makes it from a request's field; `core/tag_grammar` writes it as a grammar. Imports errors only.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from stoker.engine.errors import RequestRefused

MAX_TAGS = 128
MAX_TAG_CHARACTERS = 1000


@dataclass(frozen=True)
class StructuralTag:
    """One structure: the begin, a JSON value under the schema, the end."""

    trigger: str
    """The beginning of `begin`. Free text that comes to it goes on with a tag of this trigger."""
    begin: str
    schema: str
    """A JSON schema, as text."""
    end: str


@dataclass(frozen=True)
class StructuralTags:
    """The structures of one answer, of which any number may come, with any text between them."""

    tags: tuple[StructuralTag, ...]
    at_least_one: bool = False
    """The answer does not end before one has come."""
    stop_after_first: bool = False
    """The answer ends behind the first one."""
    text_behind: bool = True
    """Text may follow a structure; False: only further structures."""
    bare: bool = False
    """A structure without its begin and end may be the whole answer, and no other answer begins with `{`."""

    def check(self, field: str) -> None:
        """Raise RequestRefused that names the field where a limit is not kept."""
        if not 0 < len(self.tags) <= MAX_TAGS:
            raise RequestRefused("invalid", f"{field} must have 1 to {MAX_TAGS} tags, got {len(self.tags)}", field)
        for tag in self.tags:
            for name in ("trigger", "begin", "end"):
                if len(getattr(tag, name)) > MAX_TAG_CHARACTERS:
                    message = f"{field}: {name} must have at most {MAX_TAG_CHARACTERS} characters"
                    raise RequestRefused("invalid", message, field)
            if not tag.trigger or not tag.begin.startswith(tag.trigger):
                message = f"{field}: begin must start with its trigger, got {tag.begin!r} with {tag.trigger!r}"
                raise RequestRefused("invalid", message, field)

    def dump(self) -> str:
        """Return them as JSON, for `load`."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> StructuralTags:
        """Return the value that `dump` wrote."""
        content = json.loads(text)
        tags = tuple(StructuralTag(**tag) for tag in content.pop("tags"))
        return cls(tags, **content)
