"""`bench.techniques`: its table, its loads, and two techniques on a tiny model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import techniques
from bench.techniques import TECHNIQUES, Ask, Figures, Machine, Prompts, compared, joined, line, rows
from stoker.engine.config import EngineConfig
from stoker.pod.config_file import parse

BY_NAME = {one.name: one for one in TECHNIQUES}


def base(folder: Path | str) -> dict[str, Any]:
    cache = {"num_blocks": 60, "block_size": 16}
    return {"model": {"path": str(folder), "dtype": "float32"}, "device": "cpu", "threads": 1, "cache": cache}


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda one: one.name)
def test_each_technique_is_a_configuration_and_a_load(technique: techniques.Technique) -> None:
    for settings in (technique.off, technique.on):
        parse(EngineConfig, joined(base("/model"), settings))
    asks = technique.load(Prompts(1000, 3))
    assert asks == technique.load(Prompts(1000, 3)), "both sides get the same"
    assert all(0 <= token < 1000 for ask in asks for token in ask.prompt)


def test_two_techniques_on_a_tiny_model(model_folder: Path) -> None:
    def few(prompts: Prompts) -> list[Ask]:
        beginning = prompts.of(32)
        return [Ask(prompts.of(3, beginning), 4, after_step=5 * number) for number in range(3)]

    for name in ("overlap", "prefix-cache"):
        found = compared(replace(BY_NAME[name], load=few, exact=True), base(model_folder), rounds=1)
        assert found["figure"] == BY_NAME[name].figure
        assert min(found["off"], found["on"], found["gain"]) > 0


def test_other_tokens_are_no_gain(model_folder: Path) -> None:
    sides = iter([Figures(1.0, 1.0, 1.0, ((1,),)), Figures(2.0, 2.0, 2.0, ((2,),))] * 2)
    with pytest.raises(RuntimeError, match="overlap: the tokens differ, and should not"):
        compared(BY_NAME["overlap"], base(model_folder), rounds=1, measured=lambda *_: next(sides))


def test_what_a_machine_cannot_run_has_its_reason() -> None:
    chosen = [BY_NAME["graphs"], BY_NAME["tensor-parallel"]]
    assert [line(row) for row in rows(chosen[:1], {}, Machine("cpu", 0), 1)] == ["graphs                 needs a GPU"]
    assert next(rows(chosen[1:], {}, Machine("cuda", 1), 1))["why_not"] == "needs two GPUs"


def test_a_row_has_both_figures_and_the_gain() -> None:
    row = {"technique": "swap", "figure": "first_token_ms", "off": 20.0, "on": 8.0, "gain": 2.5}
    assert line(row).split() == ["swap", "first", "token,", "ms", "20.0", "8.0", "2.50", "x"]


def test_configurations_are_joined_by_section() -> None:
    one = {"cache": {"a": 1, "b": 2}, "x": 1}
    assert joined(one, {"cache": {"b": 3}, "x": 2, "y": {"z": 1}}) == {
        "cache": {"a": 1, "b": 3}, "x": 2, "y": {"z": 1},
    }  # fmt: skip
