"""`stoker plot`: loss, learning rate and gradient norm of a run, from its log or a cluster, drawn or as a PNG.

Called by the table of `main`.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from stoker.cli.braille import drawn
from stoker.cli.context import cluster_options, opened
from stoker.cli.curves import Curve, curves_of, read_curves
from stoker.cli.exit_status import FAILED, WRONG_INPUT, code_of_file
from stoker.cli.object_source import named
from stoker.cli.output_file import OutputFile, OutputFileError
from stoker.cli.run_history import KubePaths, NoHistory, PathError, run_history
from stoker.cli.targets import Target, fail
from stoker.gateway.domain.metric_task import Span
from stoker.operator.cluster.kinds import KINDS

F = TypeVar("F", bound=Callable[..., Any])
JOB_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
KINDS_OF_JOBS = ("tj", "trainingjob", "trainingjobs")

HEIGHT = 8
"""Characters of one curve in the terminal."""


def drawing_options(command: F) -> F:
    """Add the options that `stoker plot` and `stoker local plot` share."""
    options = (
        click.option("--png", type=click.Path(path_type=Path), help="Write a picture instead (needs stoker[plot])."),
        click.option("--json", "as_json", is_flag=True, help="Print the points as JSON instead."),
        click.option("--width", type=click.IntRange(min=24), help="Characters of a line; default: the terminal's."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def span_options(command: F) -> F:
    """Add --after-step and --until-step."""
    until = click.option("--until-step", type=click.IntRange(min=0), help="No later steps (of a job).")
    return click.option("--after-step", type=click.IntRange(min=0), default=0, help="Only later steps (of a job).")(
        until(command)
    )


@click.command(
    epilog="\b\nExamples:\n  stoker plot runs/.runs/teach-0/log.jsonl --png loss.png\n  stoker plot teach -n research"
)
@click.argument("target")
@span_options
@drawing_options
@cluster_options
def plot(
    target: str,
    after_step: int,
    until_step: int | None,
    png: Path | None,
    as_json: bool,
    width: int | None,
    namespace: str | None,
    context: str | None,
    kubeconfig: str | None,
) -> None:
    """Draw loss, validation loss, learning rate and gradient norm of a run.

    TARGET is a metrics log (logging.jsonl), or a job of a cluster: its name, or tj/NAME.
    """
    try:
        job = None if Path(target).exists() else job_named(target)
    except OSError as error:
        _refuse(f"{target}: {error.strerror}")
    if job is None:
        if after_step or until_step is not None:
            raise click.UsageError("--after-step and --until-step are for a job")
        try:
            found = read_curves(Path(target))
        except FileNotFoundError:
            _refuse(f"{target!r} is no file and no job: give a metrics log, the name of a job, or tj/NAME")
        except OSError as error:
            _refuse(f"{target}: {error.strerror}")
        except ValueError as error:
            _refuse(str(error))
        curves = found.curves
        warn_of_lines(found.unreadable)
    else:
        check_span(after_step, until_step)
        with opened(namespace, context, kubeconfig) as client:
            named(client, Target(KINDS["TrainingJob"], job))
            curves = job_curves(client, client.own_namespace, job, Span(after_step, until_step))
    show(curves, target, png=png, as_json=as_json, width=width)


def check_span(after_step: int, until_step: int | None) -> None:
    """End the command for a span without a step."""
    if until_step is not None and until_step <= after_step:
        raise click.UsageError(f"--until-step {until_step} is not above --after-step {after_step}: no step is left")


def job_named(target: str) -> str | None:
    """The job that a target names, as NAME or tj/NAME; None for what can be no job."""
    kind, slash, name = target.partition("/")
    if not slash:
        kind, name = KINDS_OF_JOBS[0], target
    return name if kind in KINDS_OF_JOBS and JOB_NAME.fullmatch(name) else None


def job_curves(cluster: KubePaths, namespace: str, job: str, span: Span) -> list[Curve]:
    """The curves of a job; ends the command where it has none."""
    try:
        found = run_history(cluster, namespace, job, span)
    except (PathError, NoHistory) as error:
        fail(str(error), FAILED)
    warn_of_lines(found.unreadable)
    curves = curves_of(found.points)
    if not curves:
        fail(f"job {job} has logged no such step", FAILED)
    return curves


def warn_of_lines(unreadable: int) -> None:
    """Tell of lines of a log that are left out, if there are any."""
    if unreadable:
        click.echo(f"warning: {unreadable} lines of the log cannot be read", err=True)


def show(curves: list[Curve], title: str, *, png: Path | None, as_json: bool, width: int | None) -> None:
    """Write the picture, print the points, or draw in the terminal."""
    if png is not None:
        try:
            with OutputFile(png) as file:
                file.write(picture(curves, title))
        except OutputFileError as error:
            fail(f"--png {error}", code_of_file(error))
        except ValueError as error:
            _refuse(str(error))
        click.echo(f"wrote {png}")
    elif as_json:
        click.echo(json.dumps({curve.title: {"steps": curve.steps, "values": curve.values} for curve in curves}))
    else:
        columns = width or shutil.get_terminal_size().columns
        click.echo("\n\n".join(drawn(curve, columns, HEIGHT) for curve in curves))


def picture(curves: list[Curve], title: str) -> bytes:
    """A PNG with a panel for each curve; validation loss goes into the panel of the loss.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--png needs matplotlib: install stoker[plot]") from error
    panels = [curve for curve in curves if curve.title != "validation loss"] or curves
    figure = Figure(figsize=(9, 2.6 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for place, curve in enumerate(panels, start=1):
        axes = figure.add_subplot(len(panels), 1, place)
        axes.plot(curve.steps, curve.values, label=curve.title)
        for other in curves if curve.title == "loss" else ():
            if other.title == "validation loss":
                axes.plot(other.steps, other.values, marker="o", label=other.title)
        axes.set_xlabel("step")
        axes.legend()
        axes.grid(visible=True, alpha=0.3)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _refuse(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(WRONG_INPUT)
