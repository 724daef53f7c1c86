"""`delete` on both clusters: which objects are deleted, the question before many are, and the wait for their end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import click

from stoker.cli.exit_status import FAILED, INTERRUPTED
from stoker.cli.label_selector import parse_selector
from stoker.cli.manifest_options import files_option
from stoker.cli.object_names import TARGETS
from stoker.cli.object_source import Missing, ObjectSource, missing_text, typed
from stoker.cli.option_group import option_group
from stoker.cli.question import Ask, ask_once
from stoker.cli.seconds import SECONDS
from stoker.cli.targets import Target, kind_of, parse_targets

LOOK_S = 0.5


class Deleter(ObjectSource, Protocol):
    """A cluster whose objects can be deleted."""

    def begin_deletion(self, found: dict[str, Any]) -> bool:
        """Begin to delete an object; True when it is gone already, also where a new one has its name."""

    def is_gone(self, found: dict[str, Any]) -> bool:
        """Whether the object does not exist any more."""


@dataclass(frozen=True)
class DeletionRequest:
    """What `delete` was asked for."""

    targets: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    """Manifests whose objects are deleted."""
    selector: str | None = None
    everything: bool = False
    yes: bool = False
    """Do not ask."""
    ignore_not_found: bool = False
    dry_run: bool = False
    wait: bool = True
    timeout_s: float | None = None

    def named_targets(self) -> list[Target]:
        """The targets of the command line, none for files.

        Raises click.UsageError unless objects are named in exactly one way, and options fit together.
        """
        if self.timeout_s is not None and not (self.wait and not self.dry_run):
            raise click.UsageError("--timeout belongs to --wait: leave out --no-wait and --dry-run")
        targets = parse_targets(self.targets)
        named = bool(targets) and all(target.name is not None for target in targets)
        many = self.selector is not None or self.everything
        if self.selector is not None and self.everything:
            raise click.UsageError("--selector and --all exclude each other")
        if many and (named or self.files or not targets):
            raise click.UsageError("--selector and --all need a KIND, and neither a name nor -f FILE")
        if (not many and bool(self.files) == named) or (self.files and targets):
            raise click.UsageError("give KIND NAME..., KIND/NAME..., KIND with --selector or --all, or -f FILE")
        return targets


deletion_options = option_group(
    "request",
    DeletionRequest,
    (
        click.argument("targets", nargs=-1, metavar="[KIND[,KIND] NAME... | KIND/NAME...]", type=TARGETS),
        files_option("Delete the objects of these manifests. May be repeated.", required=False),
        click.option("-l", "--selector", help="All objects of KIND with these labels; asks before it deletes."),
        click.option("--all", "everything", is_flag=True, help="All objects of KIND; asks before it deletes."),
        click.option("-y", "--yes", is_flag=True, help="Do not ask."),
        click.option("--ignore-not-found", is_flag=True, help="What does not exist is no failure."),
        click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing."),
        click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until the objects are gone."),
        click.option("--timeout", "timeout_s", type=SECONDS, help="Longest wait, in seconds."),
    ),
)
"""Adds the targets of `delete` and its options; the command receives `request`."""


def chosen_objects(
    source: ObjectSource, targets: Sequence[Target], selector: str | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects to delete, and a message for each that does not exist. Raises click.UsageError."""
    try:
        wanted = parse_selector(selector)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    found, missing = [], []
    for target in targets:
        if target.name is None:
            listed = source.listed(target.kind, wanted.equalities)
            found += [typed(target.kind, item) for item in listed if wanted.matches(item)]
            continue
        one = source.find(target)
        if isinstance(one, Missing):
            missing.append(missing_text(source, target, one))
        else:
            found.append(one)
    return found, missing


def confirm(found: Sequence[dict[str, Any]], *, yes: bool, terminal: bool) -> None:
    """Ask before objects are deleted that were not named; ends the command unless the answer is yes.

    Raises:
        click.UsageError: there is no terminal to ask on, and no --yes.
    """
    if yes or not found:
        return
    if not terminal:
        raise click.UsageError(
            f"this deletes {len(found)} objects: confirm with --yes (there is no terminal to ask on)"
        )
    for item in found:
        click.echo(f"  {title(item)}", err=True)
    if not click.confirm(f"Delete these {len(found)} objects?", err=True):
        sys.exit(INTERRUPTED)


@dataclass(frozen=True)
class DeletionWait:
    """How long a command waits for the end of objects, and what it does while the cluster does not answer."""

    ask: Ask = ask_once
    timeout_s: float | None = None
    for_end: bool = True
    """False: it waits for the cluster's answer only."""
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic

    def until_begun(self, source: Deleter, item: dict[str, Any], end: float | None) -> bool | None:
        """Begin to delete an object: whether it is gone already; None when the cluster did not answer in time."""
        while (gone := self.ask(lambda: source.begin_deletion(item))) is None:
            if end is not None and self.monotonic() >= end:
                return None
            self.sleep(LOOK_S)
        return gone

    def until_gone(self, source: Deleter, item: dict[str, Any], end: float | None) -> bool:
        """Ask until an object is gone; False when the time is over."""
        while end is None or self.monotonic() < end:
            if self.ask(lambda: source.is_gone(item)):
                return True
            self.sleep(LOOK_S)
        return False


def delete_all(source: Deleter, found: Sequence[dict[str, Any]], wait: DeletionWait) -> int:
    """Delete objects, all at once, then wait for each; the exit code."""
    end = None if wait.timeout_s is None else wait.monotonic() + wait.timeout_s
    begun = [(item, wait.until_begun(source, item, end)) for item in found]
    code = 0
    for item, gone_at_once in begun:
        if gone_at_once is None:
            click.echo(f"{title(item)} is not deleted: the cluster did not answer in {wait.timeout_s:g} s", err=True)
            code = FAILED
            continue
        gone = gone_at_once or (wait.for_end and wait.until_gone(source, item, end))
        click.echo(f"{title(item)} {'deleted' if gone else 'is being deleted'}")
        code = max(code, FAILED if wait.for_end and not gone else 0)
    return code


def run_deletion(source: Deleter, targets: Sequence[Target], request: DeletionRequest, ask: Ask = ask_once) -> int:
    """Delete what was asked for; the exit code. What a manifest names and is gone already is no failure.

    Args:
        ask: puts the requests that delete and the questions of a wait.
    """
    try:
        return _delete(source, targets, request, ask)
    except KeyboardInterrupt:
        return INTERRUPTED


def _delete(source: Deleter, targets: Sequence[Target], request: DeletionRequest, ask: Ask) -> int:
    found, missing = chosen_objects(source, targets, request.selector)
    for message in missing:
        click.echo(message, err=True)
    code = FAILED if missing and not (request.files or request.ignore_not_found) else 0
    if not found and any(target.name is None for target in targets):
        click.echo(f"nothing to delete in {source.place}", err=True)
    if request.dry_run:
        for item in found:
            click.echo(f"{title(item)} would be deleted")
        return code
    if any(target.name is None for target in targets):
        confirm(found, yes=request.yes, terminal=sys.stdin.isatty())
    return max(code, delete_all(source, found, DeletionWait(ask, request.timeout_s, for_end=request.wait)))


def title(item: dict[str, Any]) -> str:
    """The name of an object as `delete` prints it."""
    return f"{item['kind'].lower()}/{item['metadata']['name']}"


def targets_of(objects: Sequence[dict[str, Any]]) -> list[Target]:
    """The targets of manifests, the last one first; ends the command where a kind is unknown."""
    return [
        Target(kind_of(one["kind"]), one["metadata"]["name"], one["metadata"]["namespace"]) for one in reversed(objects)
    ]
