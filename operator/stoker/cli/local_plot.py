"""`stoker local plot`: the curves of a job of the embedded cluster."""

from __future__ import annotations

from pathlib import Path

import click

from stoker.cli.exit_status import FAILED, WRONG_INPUT
from stoker.cli.local_options import namespace_option, open_client, state_option
from stoker.cli.plot import check_span, drawing_options, job_curves, job_named, show, span_options
from stoker.cli.supervisor_client import SupervisorError
from stoker.cli.targets import fail
from stoker.gateway.domain.metric_task import Span


@click.command("plot", epilog="\b\nExample:\n  stoker local plot teach")
@click.argument("job")
@span_options
@drawing_options
@namespace_option
@state_option
def plot_local(
    job: str,
    after_step: int,
    until_step: int | None,
    png: Path | None,
    as_json: bool,
    width: int | None,
    namespace: str,
    state: Path | None,
) -> None:
    """Draw loss, validation loss, learning rate and gradient norm of a job, also after its end."""
    name = job_named(job)
    if name is None:
        fail(f"{job!r} is no job: give its name, or tj/NAME", WRONG_INPUT)
    check_span(after_step, until_step)
    client = open_client(state)
    try:
        curves = job_curves(client, namespace, name, Span(after_step, until_step))
    except SupervisorError as error:
        fail(str(error), FAILED)
    show(curves, job, png=png, as_json=as_json, width=width)
