"""`stoker plan`: memory, traffic and time of a TrainingJob before it starts. Starts nothing and needs no GPU.

Called by the table of `main`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import click

from stoker.cli.exit_status import FAILED, WRONG_INPUT
from stoker.cli.manifest_options import files_option
from stoker.pod.plan.estimate import Plan, make_plan
from stoker.pod.plan.gpu import GPUS, gpu_named
from stoker.pod.plan.layer_choice import BudgetTooSmall
from stoker.pod.plan.layout_rules import refusals_of_trainer
from stoker.pod.plan.layouts import layouts
from stoker.pod.plan.model_size import ModelSize

MAX_GPUS = 2**20
"""Sizes that one search can factor; every layout is looked at."""


@click.command(epilog="\b\nExample:\n  stoker plan -f examples/pretrain-64-gpus/train.yaml --gpu H200")
@files_option("Manifest, folder of manifests, or -: one TrainingJob.")
@click.option(
    "--gpu", "gpu_name", metavar="NAME", help=f"{', '.join(GPUS)}; default: the one that the node selector names."
)
@click.option(
    "--model",
    "model_path",
    type=click.Path(path_type=Path),
    help="Hugging Face folder or config.json behind modelFrom.",
)
@click.option("--gpus", type=click.IntRange(1, MAX_GPUS), help="List the layouts that fit on so many GPUs, best first.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    files: tuple[Path, ...], gpu_name: str | None, model_path: Path | None, gpus: int | None, as_json: bool
) -> None:
    """Show what one rank of a job needs: memory by part, traffic by link, time of a step.

    A job that this version does not run is planned too; what it refuses follows. Exits 1 when the job does not fit the
    GPU, and 64 when it is refused.
    """
    from stoker.operator.domain.job_plan import gpu_of_spec, job_of_spec
    from stoker.operator.domain.unsupported import not_runnable

    try:
        manifest = _admitted(files)
        spec = manifest["spec"]
        gpu = gpu_named(gpu_name) if gpu_name else gpu_of_spec(spec)
        found = make_plan(job_of_spec(spec, _model(spec, model_path), manifest["metadata"]["name"]), gpu)
    except BudgetTooSmall as error:
        _refuse(f"spec.memory.activationBudgetGiB {spec['memory']['activationBudgetGiB']}: {error}")
    except (ValueError, OSError) as error:
        _refuse(str(error))
    if gpus is not None:
        _show_layouts(found, gpus, as_json)
        return
    refused = not_runnable("TrainingJob", spec)
    if not spec.get("model"):  # the sizes of the model behind modelFrom are known here alone
        refused += [line for line in refusals_of_trainer(found.job) if not any(line in known for known in refused)]
    click.echo(json.dumps({**found.to_json(), "refused": refused}, indent=1) if as_json else described(found))
    if refused:
        _refuse("\n".join(["this version does not run the job:", *refused]))
    if found.fits is False:
        sys.exit(FAILED)


def described(plan: Plan) -> str:
    """Return the plan as tables."""
    job = plan.job
    lines = [
        f"{job.name}: {job.model.parameters / 1e9:.3g} billion parameters on {_counted(job.layout.world_size, 'rank')}:"
        f" {layout_text(plan)}",
        f"{_counted(job.micro_batches, 'micro-batch', 'micro-batches')} of {job.micro_batch_size} x "
        f"{job.sequence_length:,} tokens for each data-parallel rank, precision {job.precision}",
        "",
        *_memory_lines(plan),
        *_choice_lines(plan),
        "",
        *_traffic_lines(plan),
        *_time_lines(plan),
    ]
    return "\n".join(lines)


def layout_text(plan: Plan) -> str:
    """Return a layout in one line, without axes of size 1."""
    layout, job = plan.job.layout, plan.job
    sizes = [(name, getattr(layout, name)) for name in ("pipeline", "replicate", "shard", "context", "tensor")]
    axes = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one rank"
    extra = [f"ZeRO-{layout.zero_stage}"]
    extra += [f"expert {layout.expert}"] if layout.expert > 1 else []
    stages = f" with {layout.stages_per_rank} stages a rank" if layout.stages_per_rank > 1 else ""
    extra += [layout.schedule + stages] if layout.pipeline > 1 else []
    extra += ["sequence parallel"] if layout.sequence_parallel else []
    extra += [f"recompute {layout.recompute}"] if layout.recompute != "none" else []
    extra += [f"adapters of rank {job.adapters.rank}"] if job.adapters else []
    extra += [f"{job.offload} offload"] if job.offload else []
    return ", ".join([axes, *extra])


def _counted(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def _memory_lines(plan: Plan) -> list[str]:
    memory = plan.fullest
    rows = [_row(name, _gib(count)) for name, count in memory.parts().items()]
    total = _row("total", _gib(memory.total))
    if plan.gpu is not None:
        verdict = "fits" if plan.fits else "does not fit"
        total += f"   of {_gib(plan.gpu.memory_bytes).strip()} of an {plan.gpu.name}, with 4 for libraries: {verdict}"
    elsewhere = [_row("host, page-locked", _gib(memory.host))]
    elsewhere += [_row("volume of nvmeOffload", _gib(memory.disk))] if memory.disk else []
    return [_row("memory of a rank", "GiB"), *rows, total, *elsewhere]


def _choice_lines(plan: Plan) -> list[str]:
    """What a budget of activations makes backward compute again, by run of layers."""
    budget = plan.job.activation_budget_bytes
    if budget is None:
        return []
    lines = ["", f"computed again in backward, for at most {_gib(budget)} GiB of activations"]
    first = 0
    for choice, run in groupby(plan.choices):
        last = first + len(list(run)) - 1
        name = f"layer {first}" if first == last else f"layers {first} to {last}"
        lines.append(f"{name:26}{choice.shown()}")
        first = last + 1
    return lines


def _traffic_lines(plan: Plan) -> list[str]:
    if not plan.flows:
        return ["no traffic between ranks"]
    shown = [
        f"{_row(flow.purpose, _gib(flow.bytes))}   {flow.link:8}{'beside computation' if flow.hidden else 'waited for'}"
        for flow in plan.flows
    ]
    return [_row("sent by a rank in a step", "GiB"), *shown]


def _time_lines(plan: Plan) -> list[str]:
    time, speed = plan.time, plan.tokens_per_s_per_gpu
    if time is None or plan.gpu is None or speed is None:
        return ["", "time: give --gpu NAME"]
    rows = [_row(name, f"{1e3 * seconds:10,.1f}") for name, seconds in time.parts().items() if seconds]
    total = f"{_row('total', f'{1e3 * time.total:10,.1f}')}   {speed:,.0f} tokens/s per GPU"
    bubble = [f"bubble: {time.bubble_share:.1%} of the passes"] if time.bubble_share else []
    return ["", _row(f"step on an {plan.gpu.name}", "ms"), *rows, total, *bubble]


def _row(name: str, value: str) -> str:
    return f"{name:26}{value:>10}"


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f}" if count >= 2**27 else f"{count / 2**30:.3f}"


def _show_layouts(plan: Plan, gpus: int, as_json: bool) -> None:
    if plan.gpu is None:
        _refuse(f"--gpus {gpus} needs --gpu NAME: {', '.join(GPUS)}")
    found = layouts(plan.job, gpus, plan.gpu)
    if as_json:
        click.echo(json.dumps([one.to_json() for one in found], indent=1))
        return
    if not found:
        click.echo(f"no layout of {gpus} ranks fits an {plan.gpu.name} with global batch {plan.job.global_batch_size}")
        sys.exit(FAILED)
    for one in found[:20]:
        assert one.time is not None
        speed = f"{one.tokens_per_s_per_gpu:8,.0f} tokens/s per GPU"
        click.echo(f"{1e3 * one.time.total:10,.1f} ms {speed} {_gib(one.fullest.total):>8} GiB  {layout_text(one)}")


def _admitted(files: tuple[Path, ...]) -> Mapping[str, Any]:
    """Read the one TrainingJob, checked and with its defaults. Raises ValueError."""
    from stoker.cli.manifests import read_manifests
    from stoker.operator.admission.admission import Admission
    from stoker.operator.admission.status_cause import InvalidObject
    from stoker.operator.api.crd import KIND_INFOS, definition

    jobs = [found for found in read_manifests(files) if found.get("kind") == "TrainingJob"]
    if len(jobs) != 1:
        raise ValueError(f"exactly one TrainingJob is needed, found {len(jobs)}")
    try:
        return Admission(definition(info) for info in KIND_INFOS if info.kind == "TrainingJob").admit(jobs[0])
    except InvalidObject as refused:
        raise ValueError(str(refused)) from refused


def _model(spec: Mapping[str, Any], path: Path | None) -> ModelSize | None:
    """Read the sizes behind `modelFrom`; None for a job that gives them itself. Raises ValueError."""
    if spec.get("model"):
        if path is not None:
            raise ValueError(f"--model {path}: the job has its own spec.model; --model is for one with modelFrom")
        return None
    named = (spec["modelFrom"].get("huggingFace") or {}).get("path")
    place = path or (Path(named) if named and Path(named).is_dir() else None)
    if place is None:
        raise ValueError("the job's model is not in the manifest: give --model FOLDER with its config.json")
    return _read_size(place / "config.json" if place.is_dir() else place)


def _read_size(file: Path) -> ModelSize:
    """Read a `config.json` as the trainer reads it. Raises ValueError, which names the file."""
    from stoker.model.config import ModelConfig  # only here

    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not a JSON file ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file}: an object is needed, got {type(raw).__name__}")
    try:
        return ModelSize.from_fields(vars(ModelConfig.from_hugging_face(raw)))
    except ValueError as error:
        raise ValueError(f"{file}: {str(error).removeprefix('config.json: ')}") from error


def _refuse(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(WRONG_INPUT)
