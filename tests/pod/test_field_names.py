"""Messages of ranks name fields as the manifest does: a scan of every message of the trainer and of `stoker.pod`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from stoker.model.config import ModelConfig
from stoker.operator.api.value import wire_name
from stoker.pod.field_names import manifest_name
from stoker.trainer.protocol.config import TrainerConfig

ROOT = Path(__file__).parents[2]
FOLDERS = ("trainer/stoker/trainer", "model/stoker/pod")
INTERNAL = {"listen", "job", "resume", "deadlines", "retention", "work_dir", "termination_log", "model_from"}
"""Sections and fields that no manifest has, or has in another form."""
OTHERS = ("trainer/stoker/trainer/protocol/config.py",)
"""Its messages are about the rendered file, which has these names."""


def names_of(config: type[BaseModel], internal: set[str]) -> Iterator[str]:
    for name, field in config.model_fields.items():
        if name in internal:
            continue
        yield name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from names_of(kind, set())


NAMES = {*names_of(TrainerConfig, INTERNAL), *(field.name for field in fields(ModelConfig))}
SNAKE = {name for name in NAMES if "_" in name and not name.endswith("_s")}
"""Durations end with `_s` in the configuration and with `Seconds` in the manifest; no message has them."""
IN_TEXT = re.compile(rf"(?<![\w/])(?:{'|'.join(sorted(SNAKE, key=len, reverse=True))})(?!\w)")
IDENTIFIER = re.compile(r"[\w.]+|[\w/]+")
"""A key, a name of an attribute or of a metric: no message."""


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Every string of a file that is no docstring, with its line; of one with values the parts between them."""
    tree = ast.parse(file.read_text())
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        if id(node) in parts or not IDENTIFIER.fullmatch(node.value):
            yield node.lineno, node.value


def test_no_message_of_a_rank_has_the_name_of_the_rendered_configuration() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text!r}"
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if str(file.relative_to(ROOT)) not in OTHERS
        for line, text in texts(file)
        if IN_TEXT.search(text)
    ]
    assert found == []


@pytest.mark.parametrize("name", sorted(SNAKE))
def test_a_field_has_the_name_of_the_resource(name: str) -> None:
    assert manifest_name(name) == wire_name(name)


def test_a_path_is_that_of_the_manifest() -> None:
    assert manifest_name("memory.nvme_offload.path") == "memory.nvmeOffload.path"
    assert manifest_name("memory.activation_budget_gib") == "memory.activationBudgetGiB"
    assert manifest_name("gang.ranks_per_node") == "workers.ranksPerPod"
