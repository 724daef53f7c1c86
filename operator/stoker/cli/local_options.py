"""Options and calls that the verbs of `stoker local` share. Nothing is kept here: the state is the supervisor's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from stoker.cli.exit_status import FAILED
from stoker.cli.supervisor_client import NotRunning, SupervisorClient, SupervisorError
from stoker.cli.targets import fail
from stoker.operator.cluster.local.folders import default_state_folder

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def state_option(command: F) -> F:
    return click.option(
        "--state",
        type=click.Path(path_type=Path),
        help="Folder with the cluster's state [default: $STOKER_STATE or ~/.local/state/stoker].",
    )(command)


def namespace_option(command: F) -> F:
    return click.option("-n", "--namespace", default="default", show_default=True, help="Namespace of the objects.")(
        command
    )


def open_client(state: Path | None) -> SupervisorClient:
    """Return the client of the supervisor that owns the state folder."""
    return SupervisorClient(state or default_state_folder())


def ask(question: Callable[[], T]) -> T:
    """Call the supervisor; an error ends the command with its message."""
    try:
        return question()
    except NotRunning as error:
        fail(str(error), FAILED)
    except SupervisorError as error:
        fail(str(error), FAILED)
