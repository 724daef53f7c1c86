"""The objects that a verb of `stoker local` names by files and claims."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from stoker.cli.exit_status import WRONG_INPUT
from stoker.cli.targets import fail


def read_objects(files: Sequence[Path], claims: Sequence[str], namespace: str) -> list[dict[str, Any]]:
    """Read manifests, with a claim for each `NAME=DIR`; ends the command where one is wrong."""
    from stoker.cli.manifests import ManifestError, claim_manifest, read_manifests

    folders = parse_claims(claims)
    bound = [claim_manifest(name, folder, namespace) for name, folder in folders.items()]
    try:
        objects = read_manifests(files, namespace)
    except ManifestError as error:
        fail(str(error), WRONG_INPUT)
    others = [
        o for o in objects if o.get("kind") != "PersistentVolumeClaim" or o["metadata"].get("name") not in folders
    ]
    return [*bound, *others]


def parse_claims(claims: Sequence[str]) -> dict[str, Path]:
    """Parse `NAME=DIR` options; ends the command when a folder does not exist."""
    found = {}
    for claim in claims:
        name, _, folder = claim.partition("=")
        if not name or not folder:
            raise click.UsageError(f"--claim {claim}: NAME=DIR is needed")
        if not Path(folder).expanduser().is_dir():
            fail(f"--claim {claim}: {folder} is not a folder", WRONG_INPUT)
        if name in found:
            fail(f"--claim {claim}: {name} is given twice", WRONG_INPUT)
        found[name] = Path(folder).expanduser().resolve()
    return found


def named_in(files: Sequence[Path], namespace: str) -> list[tuple[str, str, str]]:
    """Return kind, namespace and name of the objects of manifests, the last one first."""
    found = read_objects(files, (), namespace)
    return [(o["kind"], o["metadata"]["namespace"], o["metadata"]["name"]) for o in reversed(found)]
