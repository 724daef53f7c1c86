"""Names of live objects for the completion of a shell: kinds, then what exists of them.

A completion that cannot reach a cluster within TIMEOUT_S offers nothing and says nothing.
"""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.targets import KIND_WORDS

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

TIMEOUT_S = 3

Names = Callable[[str], list[str]]
"""Kind, as a word of the command line -> names of its objects."""


class TargetWord(click.ParamType):  # type: ignore[type-arg]
    """A word of `KIND[,KIND] [NAME...]` or of `KIND/NAME...`; with a kind of its own only names of that kind."""

    name = "target"

    def __init__(self, kind: str | None = None) -> None:
        self.kind = kind

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer kinds, or names of objects that exist."""
        from click.shell_completion import CompletionItem  # only a shell that completes needs it

        before = ctx.params.get(param.name or "") or ()
        words = [] if isinstance(before, str) else list(before)
        return [
            CompletionItem(word) for word in proposals(words, incomplete, lambda kind: live_names(ctx, kind), self.kind)
        ]


TARGETS = TargetWord()
JOBS = TargetWord("tj")


def proposals(before: list[str], incomplete: str, names: Names, kind: str | None = None) -> list[str]:
    """The words that may stand where `incomplete` begins one."""
    start, slash, _ = incomplete.partition("/")
    if slash:
        return _beginning([f"{start}/{name}" for name in names(start)], incomplete)
    if kind is not None:
        return _beginning(names(kind), incomplete)
    if not before:
        listed, comma, last = incomplete.rpartition(",")
        return [f"{listed}{comma}{word}" for word in _beginning(KIND_WORDS, last)]
    if "/" in before[0]:
        return [f"{word}/" for word in _beginning(KIND_WORDS, incomplete)]
    return [name for name in _beginning(names(before[0].partition(",")[0]), incomplete) if name not in before]


def live_names(context: click.Context, kind: str) -> list[str]:
    """The names of the objects of a kind; none where the cluster does not answer in time."""
    silent = io.StringIO()
    with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stderr(silent), _deadline(TIMEOUT_S):
        return _local_names(context, kind) if _is_local(context) else _cluster_names(context, kind)
    return []


def _is_local(context: click.Context) -> bool:
    return context.parent is not None and context.parent.info_name == "local"


def _cluster_names(context: click.Context, kind: str) -> list[str]:
    from stoker.cli.context import opened
    from stoker.operator.cluster.kinds import find_kind

    given: dict[str, Any] = context.params
    with opened(given.get("namespace"), given.get("context"), given.get("kubeconfig")) as client:
        return [item["metadata"]["name"] for item in client.listed(find_kind(kind), {})]


def _local_names(context: click.Context, kind: str) -> list[str]:
    from stoker.cli.local_options import open_client
    from stoker.operator.cluster.kinds import find_kind

    given: dict[str, Any] = context.params
    state = given.get("state")
    found = open_client(Path(state) if state else None).objects(
        find_kind(kind).name, namespace=given.get("namespace") or "default"
    )
    return [item["metadata"]["name"] for item in found]


@contextlib.contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread after so long."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _beginning(words: list[str], start: str) -> list[str]:
    return [word for word in words if word.startswith(start)]
