"""What a command line names: kinds, objects, the pods of an object; and how a verb ends with an error.

Called by the verbs of `stoker local` and of a cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from stoker.cli.exit_status import WRONG_INPUT
from stoker.operator.cluster.kinds import Kind, find_kind
from stoker.operator.domain.labels import CHECKPOINT_UID, DEPLOYMENT_UID, JOB_UID, METRICS_ROLE, ROLE


def kind_of(word: str) -> Kind:
    """The kind that a word means; ends the command where it means none."""
    try:
        return find_kind(word)
    except ValueError as error:
        fail(str(error), WRONG_INPUT)


def named_once(kind: str, name: str | None) -> tuple[str, str | None]:
    """Split KIND/NAME, or take the two words as they are."""
    word, slash, own = kind.partition("/")
    if slash and name:
        raise click.UsageError(f"the name is given twice: {own} and {name}")
    return word, own or name


def job_name(_context: click.Context, _parameter: click.Parameter, given: str) -> str:
    """The name of a job, given as NAME or as KIND/NAME, which other verbs take."""
    word, slash, name = given.partition("/")
    if not slash:
        return given
    if kind_of(word).name != "TrainingJob" or not name:
        raise click.BadParameter(f"{given!r} is no job: give its name, or tj/NAME")
    return name


def named_or_filed(
    kind: str | None, names: tuple[str, ...], files: Sequence[Path]
) -> tuple[str | None, tuple[str, ...]]:
    """Split KIND/NAME where it is alone; ends the command unless it names objects or files, and not both."""
    if kind and "/" in kind and not names:
        kind, _, name = kind.partition("/")
        names = (name,)
    if bool(files) == bool(kind and names):
        raise click.UsageError("give KIND NAME..., or -f FILE")
    return kind, names


def belongs_to(uid: str, pod: Mapping[str, Any]) -> bool:
    """Whether a pod carries an object's uid in a label, or is owned by it and does not only read its metrics."""
    labels = pod["metadata"].get("labels") or {}
    if labels.get(ROLE) == METRICS_ROLE:
        return False
    labelled = uid in (labels.get(JOB_UID), labels.get(DEPLOYMENT_UID), labels.get(CHECKPOINT_UID))
    return labelled or any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences") or ())


def prefixed(text: str, prefix: str) -> str:
    """Put a prefix before each line."""
    return "".join(f"{prefix}{line}" for line in text.splitlines(keepends=True)) if prefix else text


def fail(message: str, code: int) -> NoReturn:
    """End the command."""
    click.echo(f"error: {message}", err=True)
    sys.exit(code)
