"""What a command line names: kinds, objects, the pods of an object; and how a verb ends with an error.

Called by the verbs of `stoker local` and of a cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import click

from stoker.cli.exit_status import WRONG_INPUT
from stoker.operator.cluster.kinds import Kind, find_kind
from stoker.operator.domain.labels import CHECKPOINT_UID, DEPLOYMENT_UID, JOB_UID, METRICS_ROLE, ROLE

KIND_WORDS = ["tj", "ckpt", "infd", "epool", "pods", "services", "configmaps", "pvc", "events", "nodes"]
"""The words for kinds that completion offers."""
WITH_PODS = ("Pod", "TrainingJob", "Checkpoint", "InferenceDeployment", "EnginePool")
"""Kinds that have logs."""


def kind_of(word: str) -> Kind:
    """The kind that a word means; ends the command where it means none."""
    try:
        return find_kind(word)
    except ValueError as error:
        fail(str(error), WRONG_INPUT)


class Target(NamedTuple):
    """One object, or with None as its name all of a kind."""

    kind: Kind
    name: str | None = None
    namespace: str | None = None
    """None: that of the command."""


def parse_targets(words: Sequence[str]) -> list[Target]:
    """Parse `KIND[,KIND...] [NAME...]` or `KIND/NAME...`, as kubectl does; ends the command where it is neither."""
    if not words:
        return []
    if any("/" in word for word in words):
        return [_target(word) for word in words]
    kinds = [_kind_before_names(word) for word in words[0].split(",")]
    names: Sequence[str | None] = words[1:] or [None]
    return [Target(kind, name) for name in names for kind in kinds]


def _kind_before_names(word: str) -> Kind:
    """The kind that a word means; ends the command where it means none, which may be a name whose kind is missing."""
    try:
        return find_kind(word)
    except ValueError as error:
        fail(f"{error}. An object is named as KIND/NAME: tj/{word}", WRONG_INPUT)


def _target(word: str) -> Target:
    kind, slash, name = word.partition("/")
    if not slash or not kind or not name or "/" in name:
        raise click.UsageError(f"{word!r} is no KIND/NAME; give KIND NAME..., or KIND/NAME for each object")
    return Target(kind_of(kind), name)


def log_target(text: str) -> Target:
    """Parse the NAME of a pod, or the KIND/NAME of an object that has pods; ends the command where it is neither."""
    word, slash, name = text.rpartition("/")
    kind = kind_of(word if slash else "pod")
    if kind.name not in WITH_PODS:
        raise click.UsageError(f"{text!r} has no pods of its own; give a pod, or tj/, ckpt/, infd/ or epool/NAME")
    return Target(kind, name)


def job_name(_context: click.Context, _parameter: click.Parameter, given: str) -> str:
    """The name of a job, given as NAME or as KIND/NAME, which other verbs take."""
    word, slash, name = given.partition("/")
    if not slash:
        return given
    if kind_of(word).name != "TrainingJob" or not name:
        raise click.BadParameter(f"{given!r} is no job: give its name, or tj/NAME")
    return name


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
