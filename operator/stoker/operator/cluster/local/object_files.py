"""Objects as files, one each, replaced atomically: `objects/<kind>/<namespace>/<name>.json`. Only the supervisor writes here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from stoker.operator.cluster.local.merge import Intent
from stoker.operator.domain.plan import Key, Object


class ObjectFiles:
    """A Keeper for `ObjectStore`. Names were checked before: they are DNS names and cannot leave the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> Iterator[tuple[Object, dict[str, Intent]]]:
        """Every object that was kept. Half-written files of a crash are removed.

        Raises:
            ValueError: a file is not what this class writes; the message names it.
        """
        for leftover in self.folder.glob("*/*/*.new"):
            leftover.unlink()
        for file in sorted(self.folder.glob("*/*/*.json")):
            try:
                kept = json.loads(file.read_text())
                yield kept["object"], kept["intents"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}: not an object of the embedded cluster: {error!r}") from error

    def save(self, resource: Object, intents: Mapping[str, Intent]) -> None:
        metadata = resource["metadata"]
        file = self._file(Key(resource["kind"], metadata["namespace"], metadata["name"]))
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        content = json.dumps({"object": resource, "intents": intents}, separators=(",", ":"))
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w") as stream:
            stream.write(content)
        new.replace(file)

    def drop(self, key: Key) -> None:
        self._file(key).unlink(missing_ok=True)

    def _file(self, key: Key) -> Path:
        return self.folder / key.kind / key.namespace / f"{key.name}.json"
