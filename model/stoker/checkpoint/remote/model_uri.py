"""URIs of models: parsed once, refused with the form that is allowed. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stoker.checkpoint.errors import CheckpointError

Scheme = Literal["hf", "s3", "oci"]

FORMS = "hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX or oci://REGISTRY/REPOSITORY[:TAG or @DIGEST]"
_HUB = re.compile(r"(?P<place>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?")
_BUCKET = re.compile(r"(?P<place>[a-z0-9][a-z0-9.-]+(?:/[^/]+)*)/?")
_REGISTRY = re.compile(
    r"(?P<place>[\w.-]+(?::\d+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)+)"
    r"(?::(?P<tag>[\w][\w.-]{0,127}))?(?:@(?P<revision>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True)
class ModelUri:
    """The parts of a URI."""

    scheme: Scheme
    place: str
    """`ORG/NAME`, `BUCKET/PREFIX` or `REGISTRY/REPOSITORY`."""
    revision: str = ""
    """Branch, tag or commit of a hub's repository; tag or digest in a registry."""

    def __str__(self) -> str:
        if not self.revision:
            return f"{self.scheme}://{self.place}"
        mark = ":" if self.scheme == "oci" and not self.revision.startswith("sha256:") else "@"
        return f"{self.scheme}://{self.place}{mark}{self.revision}"

    @property
    def name(self) -> str:
        """The last part of the place, as a model's name."""
        return self.place.rpartition("/")[2]


def is_model_uri(text: str) -> bool:
    """Whether a text names a model elsewhere; a path does not."""
    return text.startswith(("hf://", "s3://", "oci://"))


def model_name(path: str) -> str:
    """Return the name by which a model is served: the last part of its path or URI."""
    return parse_model_uri(path).name if is_model_uri(path) else Path(path).name


def parse_model_uri(text: str) -> ModelUri:
    """Parse a URI.

    Raises:
        CheckpointError: the text, and the forms that are allowed.
    """
    scheme, _, rest = text.partition("://")
    if scheme == "hf" and (found := _HUB.fullmatch(rest)):
        return ModelUri("hf", found["place"], found["revision"] or "main")
    if scheme == "s3" and (found := _BUCKET.fullmatch(rest)) and ".." not in found["place"].split("/"):
        return ModelUri("s3", found["place"])
    if scheme == "oci" and (found := _REGISTRY.fullmatch(rest)):
        return ModelUri("oci", found["place"], found["revision"] or found["tag"] or "latest")
    raise CheckpointError(f"{text!r} names no model; allowed: {FORMS}")
