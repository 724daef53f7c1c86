"""`get` of both clusters: which objects are listed, how they are printed, and a watch that prints what changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import click

from stoker.cli.exit_status import INTERRUPTED
from stoker.cli.label_selector import LabelSelector, parse_selector
from stoker.cli.listing_options import ListingRequest
from stoker.cli.object_source import ObjectSource, named, typed
from stoker.cli.output_format import Format, text_of
from stoker.cli.printers import colour_of, table, utc_now
from stoker.cli.question import Ask, ask_once
from stoker.cli.targets import Target
from stoker.cli.text_style import TextStyle, aligned, line_of, phase_column, style_of, widths_of

LOOK_S = 1.0


@dataclass(frozen=True)
class Listing:
    """The objects that a command line asks for."""

    source: ObjectSource
    targets: Sequence[Target]
    selector: LabelSelector
    all_namespaces: bool = False

    def look(self) -> list[dict[str, Any]]:
        """Read the objects now, in the order of the targets; ends the command where a named one does not exist."""
        found = []
        for target in self.targets:
            if target.name is not None:
                found.append(named(self.source, target))
            else:
                listed = self.source.listed(target.kind, self.selector.equalities)
                found += [typed(target.kind, item) for item in listed if self.selector.matches(item)]
        return found

    @property
    def alone(self) -> bool:
        """Whether one object is asked for by its name."""
        return len(self.targets) == 1 and self.targets[0].name is not None

    @property
    def nothing(self) -> str:
        """The message where there is no object."""
        names = list(dict.fromkeys(target.kind.plural for target in self.targets))
        what = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
        chosen = " with these labels" if self.selector.requirements else ""
        return f"no {what}{chosen} in {self.source.place}"


def listing_of(
    source: ObjectSource, targets: Sequence[Target], *, selector: str | None, all_namespaces: bool
) -> Listing:
    """Check what was asked. Raises click.UsageError."""
    if any(target.name is not None for target in targets):
        if all_namespaces:
            raise click.UsageError("a name and --all-namespaces exclude each other: names are those of one namespace")
        if selector is not None:
            raise click.UsageError("a name and --selector exclude each other")
    try:
        return Listing(source, targets, parse_selector(selector), all_namespaces)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def run_listing(source: ObjectSource, targets: Sequence[Target], request: ListingRequest, ask: Ask = ask_once) -> int:
    """Print the objects, once or until it is interrupted; the exit code. Raises click.UsageError.

    Args:
        ask: puts each look of a watch but the first.
    """
    listing = listing_of(source, targets, selector=request.selector, all_namespaces=request.all_namespaces)
    style, headers = style_of(), not request.no_headers
    if not request.watch:
        print_listing(listing, request.form, style, headers=headers)
        return 0
    try:
        Watch(listing, request.form, style, headers=headers, ask=ask).for_ever()
    except KeyboardInterrupt:
        return INTERRUPTED


def print_listing(listing: Listing, output: Format, style: TextStyle, *, headers: bool = True) -> None:
    """Print the objects once."""
    found = listing.look()
    if not output.is_table:
        text = text_of(found, output, alone=listing.alone)
        click.echo(text, nl=bool(text))
    elif found:
        click.echo("\n\n".join(_tables(found, listing, output, style, headers=headers)))
    else:
        click.echo(listing.nothing, err=True)


def _tables(
    found: Sequence[dict[str, Any]], listing: Listing, output: Format, style: TextStyle, *, headers: bool
) -> list[str]:
    texts = []
    for kind in dict.fromkeys(item["kind"] for item in found):
        items = [item for item in found if item["kind"] == kind]
        rows = table(kind, items, utc_now(), wide=output is Format.WIDE, namespaced=listing.all_namespaces)
        text = aligned(rows, style, [colour_of(item) for item in items])
        texts.append(text if headers else text.partition("\n")[2])
    return texts


class _Seen(NamedTuple):
    version: str
    item: dict[str, Any]


class Watch:
    """Prints the objects, then each that changes, comes or goes, until it is interrupted.

    The columns are those of the first table of their kind; a later cell that is wider pushes the rest of its line.
    """

    def __init__(
        self,
        listing: Listing,
        output: Format,
        style: TextStyle,
        *,
        headers: bool = True,
        ask: Ask = ask_once,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.listing, self.output, self.style, self.headers = listing, output, style, headers
        self.ask, self.sleep = ask, sleep
        self._seen: dict[tuple[str, str, str], _Seen] = {}
        self._widths: dict[str, list[int]] = {}

    def for_ever(self) -> NoReturn:
        """Print until KeyboardInterrupt."""
        self.look()
        while True:
            self.sleep(LOOK_S)
            if (found := self.ask(self.listing.look)) is not None:
                self._print_changes(found)

    def look(self) -> None:
        """Print what changed since the last look."""
        self._print_changes(self.listing.look())

    def _print_changes(self, found: list[dict[str, Any]]) -> None:
        now = {_key(item): _Seen(str(item["metadata"].get("resourceVersion")), item) for item in found}
        changed = [seen.item for key, seen in now.items() if self._seen.get(key, _Seen("", {})).version != seen.version]
        gone = [seen.item for key, seen in self._seen.items() if key not in now]
        self._seen = now
        for kind in dict.fromkeys(item["kind"] for item in changed):
            self._print([item for item in changed if item["kind"] == kind])
        for item in gone:
            click.echo(f"{item['kind'].lower()}/{item['metadata']['name']} deleted", err=not self.output.is_table)

    def _print(self, items: list[dict[str, Any]]) -> None:
        if not self.output.is_table:
            for item in items:
                start = "---\n" if self.output is Format.YAML else ""
                click.echo(start + text_of([item], self.output, alone=True))
            return
        kind = items[0]["kind"]
        wide = self.output is Format.WIDE
        rows = table(kind, items, utc_now(), wide=wide, namespaced=self.listing.all_namespaces)
        first = kind not in self._widths
        widths = self._widths.setdefault(kind, widths_of(rows))
        if first and self.headers:
            click.echo(aligned(rows, self.style).partition("\n")[0])
        for row, item in zip(rows[1:], items, strict=True):
            click.echo(line_of(row, widths, self.style, colour_of(item), phase_column(rows[0])))


def _key(item: dict[str, Any]) -> tuple[str, str, str]:
    metadata = item["metadata"]
    return item["kind"], str(metadata.get("namespace", "")), metadata["name"]
