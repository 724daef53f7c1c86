"""Offered, refused and built values agree, one by one. Imports both sides, as `test_contract_config.py` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from stoker.engine.config import EngineConfig
from stoker.model.config import ARCHITECTURES
from stoker.model.kernels.ops import Ops
from stoker.operator.api.crd import KIND_INFOS, definition
from stoker.operator.api.not_yet import BEGIN, END, main, with_listing
from stoker.operator.api.value import wire_name
from stoker.operator.domain.unsupported import unsupported
from stoker.pod.capabilities import ATTENTION, CAPABILITIES, PAGED_ATTENTION, refusals, shown
from stoker.router.config import RouterConfig
from stoker.router.policy import policy_named
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.kernel_choice import DTYPES

ROOT = Path(__file__).parents[2]
KINDS = tuple(info.kind for info in KIND_INFOS)
CONFIGS: Mapping[str, type[BaseModel]] = {"trainer": TrainerConfig, "engine": EngineConfig, "router": RouterConfig}

WHOLLY_BUILT: dict[str, dict[str, list[str]]] = {
    "TrainingJob": {
        "model.architecture": list(ARCHITECTURES),
        "modelFrom.checkpoint.state": ["Weights", "All"],
        "parallelism.contextMethod": ["AllGather", "Ring", "Ulysses"],
        "parallelism.pipelineSchedule": ["GPipe", "OneFOneB", "Interleaved", "ZeroBubble"],
        "training.deterministic": ["Off", "SameLayout", "AnyDataParallel"],
        "optimization.schedule": ["cosine", "linear", "constant"],
        "lora.targets[]": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "data.sources[].format": ["auto", "text", "jsonl", "parquet", "tokens"],
        "data.tokenizer.kind": ["auto", "path", "train"],
        "data.validation.source.format": ["auto", "text", "jsonl", "parquet", "tokens"],
        "checkpoint.deletionPolicy": ["Retain", "Delete"],
        "run.applyChanges": ["NextAttempt", "Restart"],
        "guards.lossSpike": ["Off", "Record", "Skip", "Rewind"],
        "scheduling.backend": ["auto", "stoker", "kueue", "volcano"],
        "scheduling.topology[].mode": ["Preferred", "Required"],
        "runtime.device": ["auto", "cpu", "cuda"],
    },
    "Checkpoint": {"deletionPolicy": ["Retain", "Delete"], "verification": ["Manifest", "Full"]},
    "InferenceDeployment": {
        "model.checkpointSelector.policy": ["newest", "best"],
        "model.checkpointSelector.metric": ["loss", "validationLoss"],
        "model.dtype": ["auto", "float32", "bfloat16", "float16"],
        "engine.cache.preemption": ["auto", "swap", "recompute"],
        "engine.device": ["auto", "cpu", "cuda"],
        "engine.transfer.require": ["any", "nvlink", "rdma"],
        "pools[].role": ["colocated", "prefill", "decode"],
        "pools[].scheduling.backend": ["auto", "stoker", "kueue", "volcano"],
        "pools[].scheduling.topology[].mode": ["Preferred", "Required"],
        "router.policy": ["leastPending", "roundRobin", "powerOfTwo", "random", "cacheAware", "locality"],
        "rollout.canary.metricGates[].metric": ["errorRate", "ttftP95Ms", "itlP95Ms", "queueP95Ms"],
        "router.service.type": ["ClusterIP", "NodePort", "LoadBalancer"],
        "pools[].autoscaling.mode": ["slo", "load", "fixed", "external"],
        "rollout.type": ["rolling", "canary"],
        "rollout.canary.onFailure": ["RollBack", "Pause"],
    },
    "EnginePool": {
        "revisions[].template.role": ["colocated", "prefill", "decode"],
        "revisions[].template.scheduling.backend": ["auto", "stoker", "kueue", "volcano"],
        "revisions[].template.scheduling.topology[].mode": ["Preferred", "Required"],
    },
}
"""Choices without a row: a new one, or a new value of one, belongs here or into the table."""

KUBERNETES = ("tolerations[].", "volumes[].")
"""Choices that Kubernetes understands."""

NOT_YET = "is not supported yet"
"""In the line of a value that is not built; other lines name what a value needs beside it."""

BELOW_UNBUILT: tuple[str, ...] = ()
"""Choices inside of sections that are refused as a whole."""


def spec_of(kind: str) -> dict[str, Any]:
    info = next(info for info in KIND_INFOS if info.kind == kind)
    spec: dict[str, Any] = definition(info)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return spec


def choices(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield (path, values) of every field with an enumeration."""
    for name, member in schema.get("properties", {}).items():
        where = f"{path}.{name}" if path else name
        if member.get("type") == "array":
            where, member = f"{where}[]", member["items"]
        if "enum" in member:
            yield where, member["enum"]
        yield from choices(member, where)


def member(config: Any, name: str) -> Any:
    """Return the type of a section, of its optional content, or of the items of its list."""
    found = config.model_fields[name.removesuffix("[]")].annotation
    inner = [kind for kind in get_args(found) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return inner[0] if inner else found


def nested(path: str, value: Any) -> Any:
    """Return an object with `value` at the path, one item in each list."""
    if not path:
        return value
    name, _, rest = path.partition(".")
    inner = nested(rest, value)
    return {name.removesuffix("[]"): [inner] if name.endswith("[]") else inner}


@pytest.mark.parametrize("kind", KINDS)
def test_every_path_of_the_table_is_a_field_of_the_kind(kind: str) -> None:
    for path in CAPABILITIES[kind]:
        schema = spec_of(kind)
        for part in path.split("."):
            schema = schema["properties"][part.removesuffix("[]")]
            schema = schema["items"] if part.endswith("[]") else schema


@pytest.mark.parametrize("program", CONFIGS)
def test_every_path_of_the_table_is_a_field_of_the_configuration(program: str) -> None:
    for path in CAPABILITIES[program]:
        config: Any = CONFIGS[program]
        for part in path.split("."):
            config = member(config, part)


def test_the_table_has_the_programs_and_the_kinds() -> None:
    assert set(CAPABILITIES) == {*CONFIGS, *KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_of_a_kind_is_built_or_refused_by_name(kind: str) -> None:
    free = {}
    for path, values in choices(spec_of(kind)):
        row = CAPABILITIES[kind].get(path)
        if row is None:
            free[path] = values
            continue
        for value in values:
            found = [line for line in unsupported(kind, nested(path, value)) if NOT_YET in line]
            if row.allows(value):
                assert found == []
            else:
                (line,) = found
                assert f" {shown(value)} {NOT_YET}; allowed: {', '.join(map(shown, row.values))}" in line
                assert line.startswith("spec.")
    ours = {
        path: values
        for path, values in free.items()
        if not any(part in path for part in KUBERNETES) and not path.startswith(BELOW_UNBUILT)
    }
    assert ours == WHOLLY_BUILT[kind]


@pytest.mark.parametrize("program", CONFIGS)
def test_a_program_refuses_exactly_the_choices_that_its_rows_leave_out(program: str) -> None:
    for path, row in CAPABILITIES[program].items():
        *sections, field = path.split(".")
        config: Any = CONFIGS[program]
        for section in sections:
            config = member(config, section)
        offered = [value for value in get_args(config.model_fields[field].annotation) if isinstance(value, str)]
        assert not row.values or not offered or set(row.values) <= set(offered), path
        for value in offered:
            assert bool(refusals(program, nested(path, value))) == (not row.allows(value)), path


@pytest.mark.parametrize(
    ("kind", "program", "places"),
    [
        ("TrainingJob", "trainer", {"kernels": "runtime.kernels", "attention": "runtime.attention"}),
        ("InferenceDeployment", "engine", {"kernels": "engine.kernels", "attention": "engine.attention"}),
        ("InferenceDeployment", "router", {}),
    ],
)
def test_a_kind_offers_what_its_program_has_built(kind: str, program: str, places: dict[str, str]) -> None:
    prefixes = {"api": "engine.api", "parallelism": "pools[].parallelism"} if program == "engine" else {}
    for path, row in CAPABILITIES[program].items():
        first, *others = path.split(".")
        camel = ".".join([prefixes.get(first, first), *(wire_name(part) for part in others)])
        assert CAPABILITIES[kind][places.get(path, camel)] == row


def test_the_rows_are_what_the_programs_have_built() -> None:
    trainer = CAPABILITIES["trainer"]
    offered = spec_of("TrainingJob")["properties"]["model"]["properties"]["architecture"]["enum"]
    assert tuple(offered) == ARCHITECTURES
    assert set(trainer["memory.precision"].values) == set(DTYPES)
    for policy in next(values for path, values in choices(spec_of("InferenceDeployment")) if path == "router.policy"):
        assert callable(policy_named(policy))


def test_the_choices_of_attention_are_those_of_the_kernels() -> None:
    packed, paged = ({name for names in table.values() for name in names} for table in (ATTENTION, PAGED_ATTENTION))
    assert set(CAPABILITIES["trainer"]["attention"].values) == {"auto", *packed}
    assert set(CAPABILITIES["engine"]["attention"].values) == {"auto", *paged}
    reference = Ops("reference", False)
    assert reference.attention("auto") == "sdpa"
    assert reference.attention("auto", None, "paged") == "sdpa"


def test_the_readme_lists_what_is_not_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", str(ROOT / "README.md")]) == 0
    stale = tmp_path / "README.md"
    stale.write_text(f"before\n{BEGIN}\n* nothing\n{END}\nafter\n")
    assert main(["--check", str(stale)]) == 1
    assert "is out of date: run python -m stoker.operator.api.not_yet --write" in capsys.readouterr().err
    assert main(["--write", str(stale)]) == 0
    assert main(["--check", str(stale)]) == 0
    text = stale.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "* InferenceDeployment: `engine.attention` cudnn." in text
    assert "runtime.kernels" not in text
    with pytest.raises(ValueError, match="are missing"):
        with_listing("no marks")
