"""`describe` of both clusters: objects with their events, as pages or as data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from stoker.cli.event_time import time_of
from stoker.cli.label_selector import LabelSelector
from stoker.cli.listing import Listing
from stoker.cli.object_source import ObjectSource
from stoker.cli.output_format import Format, without_managed_fields
from stoker.cli.printers import described, utc_now
from stoker.cli.targets import Target
from stoker.operator.cluster.kinds import KINDS


def print_descriptions(source: ObjectSource, targets: Sequence[Target], output: Format) -> None:
    """Print the objects of targets; ends the command where a named one does not exist."""
    listing = Listing(source, targets, LabelSelector())
    found = listing.look()
    if not found:
        click.echo(listing.nothing, err=True)
        return
    events = source.listed(KINDS["Event"], {})
    facts: list[dict[str, Any]] = [
        {"object": without_managed_fields(item), "events": events_of(item, events)} for item in found
    ]
    if output is Format.TABLE:
        click.echo(
            "\n\n".join(described(item, fact["events"], utc_now()) for item, fact in zip(found, facts, strict=True))
        )
        return
    whole: Any = facts[0] if listing.alone else {"items": facts}
    if output is Format.JSON:
        click.echo(json.dumps(whole, indent=1))
    else:
        from stoker.cli.manifest_yaml import written

        click.echo(written(json.loads(json.dumps(whole))), nl=False)


def events_of(found: dict[str, Any], events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events about an object, oldest first."""
    uid = found["metadata"].get("uid")
    own = [event for event in events if (event.get("involvedObject") or {}).get("uid") == uid]
    return sorted(own, key=time_of)
