"""The images of the end-to-end run and their contents. Values only; `builder.py` builds them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
REGISTRY = "localhost/stoker"
DEBIAN = "bookworm"
INSTALLER = "images/install-locked.sh"
BASE_PACKAGES = ("ca-certificates", "python3", "python3-venv")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One image from one Dockerfile of the repository."""

    name: str
    """The image's name with its tag, as pods write it."""
    dockerfile: str
    """Path of the Dockerfile, relative to the repository."""
    lock: str
    """The lock file of its large layers, relative to the repository."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels beyond the Dockerfile's; a label makes another image of the same layers."""
    context: Path = REPOSITORY
    """The checkout whose sources go into the image; Dockerfiles are always the repository's."""

    @property
    def large_layers(self) -> tuple[str, ...]:
        """The inputs of its large layers, relative to the repository."""
        return (self.dockerfile, INSTALLER, self.lock)

    @property
    def ignore_file(self) -> str:
        return f"{self.dockerfile}.dockerignore"


CONTROL = Recipe(name=f"{REGISTRY}/control:e2e", dockerfile="images/control.Dockerfile", lock="lock/control.txt")
CONTROL_NEXT = Recipe(
    name=f"{REGISTRY}/control:e2e-next",
    dockerfile="images/control.Dockerfile",
    lock="lock/control.txt",
    labels={"stoker.dev/edition": "next"},
)
"""The operator that an upgrade moves to: the same program under another digest."""
RUNTIME = Recipe(name=f"{REGISTRY}/runtime:e2e", dockerfile="images/runtime.Dockerfile", lock="lock/runtime.txt")

ALL = (CONTROL, CONTROL_NEXT, RUNTIME)


def base_name() -> str:
    """Return the name of the base image; its tag changes with its content."""
    key = hashlib.sha256(json.dumps([DEBIAN, BASE_PACKAGES]).encode()).hexdigest()[:12]
    return f"{REGISTRY}/python-base:{key}"
