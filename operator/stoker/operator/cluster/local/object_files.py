"""Objects as files `objects/<kind>/<namespace>/<name>.json`, each written whole, synced and sealed with a checksum.

`objects/index.json` lists the uid of every object, so that a file that disappears is noticed. A damaged file is renamed
to `NAME.json.damaged` and reported; the others are loaded. Only the supervisor writes here.

Made by the supervisor; the object store writes through it.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stoker.operator.cluster.kinds import KINDS
from stoker.operator.cluster.local.merge import Intent
from stoker.operator.cluster.local.object_storage import LoadedObjects, LostObject, StoredObject
from stoker.operator.cluster.local.whole_file import DamagedFile, remove_file, seal, set_aside, unseal, write_whole
from stoker.operator.domain.plan import Key, Object

log = logging.getLogger(__name__)

PROBE_BYTES = 4096


class ObjectFiles:
    """The storage of an `ObjectStore`. Names were checked before: they are DNS names and cannot leave the folder.

    Args:
        write: replaces `write_whole` in tests.
        guard: called before each write; raises OSError where this process may not write any more.
    """

    def __init__(
        self,
        folder: Path,
        *,
        write: Callable[[Path, bytes], None] = write_whole,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.guard = guard
        self._write_whole = write
        self._index: dict[Key, str] = {}
        """Key -> uid, as `index.json` has it. Events are not listed: they are only advice."""
        self._index_is_old = False

    @property
    def index(self) -> Path:
        return self.folder / "index.json"

    def load(self) -> LoadedObjects:
        """Read every object and report those that are damaged or missing. Half-written files of a crash are removed."""
        for leftover in (*self.folder.glob("*/*/*.new"), *self.folder.glob("*.new")):
            with contextlib.suppress(OSError):
                leftover.unlink()
        known, problems = self._read_index()
        objects: dict[Key, StoredObject] = {}
        lost: dict[Key, LostObject] = {}
        for file in sorted(self.folder.glob("*/*/*.json")):
            key = Key(file.parent.parent.name, file.parent.name, file.stem)
            try:
                objects[key] = _read(file, key)
            except (DamagedFile, OSError) as error:
                lost[key] = LostObject(key, known.get(key, ""), f"{_kept_as(file, error)}: {error}")
        for key in set(known) - set(objects) - set(lost):
            lost[key] = LostObject(key, known[key], self._absent(key))
        uids = {key: stored.resource["metadata"]["uid"] for key, stored in objects.items()}
        self._index = known
        self._replace_index({key: uid for key, uid in uids.items() if _is_listed(key)} | _uids(lost))
        return LoadedObjects(tuple(objects.values()), tuple(lost[key] for key in sorted(lost)), tuple(problems))

    def save(self, resource: Object, intents: Mapping[str, Intent]) -> None:
        """Write an object, and its uid into the index when it is new.

        Raises:
            OSError: nothing was written; what was stored before is still there.
        """
        self.guard()
        if self._index_is_old:
            self._save_index(self._index)
        metadata = resource["metadata"]
        key = Key(resource["kind"], metadata["namespace"], metadata["name"])
        body = json.dumps({"object": resource, "intents": intents}, separators=(",", ":"))
        self._write_whole(self._file(key), seal(body.encode()))
        if _is_listed(key) and self._index.get(key) != metadata["uid"]:
            try:
                self._save_index({**self._index, key: metadata["uid"]})
            except OSError:
                with contextlib.suppress(OSError):
                    remove_file(self._file(key))
                raise

    def drop(self, key: Key) -> None:
        """Delete an object: from the index first, so that a crash in between does not leave a missing object.

        Raises:
            OSError: the file is still there.
        """
        self.guard()
        if key in self._index:
            self._save_index({known: uid for known, uid in self._index.items() if known != key})
        remove_file(self._file(key))

    def probe(self) -> None:
        """Write and delete a small file.

        Raises:
            OSError: the folder cannot be written.
        """
        self.guard()
        file = self.folder / "probe"
        self._write_whole(file, b"\0" * PROBE_BYTES)
        remove_file(file)

    def _file(self, key: Key) -> Path:
        return self.folder / key.kind / key.namespace / f"{key.name}.json"

    def _read_index(self) -> tuple[dict[Key, str], list[str]]:
        """Read the index, empty if there is none, and the problems with it."""
        try:
            content = unseal(self.index.read_bytes())
            found = {Key(*name.split("/")): str(uid) for name, uid in json.loads(content)["objects"].items()}
        except FileNotFoundError:
            return {}, []
        except (DamagedFile, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            consequence = "objects whose files are missing cannot be named"
            return {}, [f"{_kept_as(self.index, error)}: {error}; {consequence}"]
        return found, []

    def _replace_index(self, wanted: dict[Key, str]) -> None:
        """Bring the index up to date; on a full disk the next write does it."""
        if wanted == self._index and self.index.exists():
            return
        self._index, self._index_is_old = wanted, True
        try:
            self.guard()
            self._save_index(wanted)
        except OSError as error:
            log.warning("%s: not written: %s", self.index, error)

    def _save_index(self, wanted: dict[Key, str]) -> None:
        body = json.dumps({"objects": {"/".join(key): uid for key, uid in sorted(wanted.items())}}, indent=0)
        self._write_whole(self.index, seal(body.encode()))
        self._index, self._index_is_old = wanted, False

    def _absent(self, key: Key) -> str:
        """Explain why an object of the index has no file."""
        file = self._file(key)
        aside = sorted(file.parent.glob(f"{file.name}*.damaged")) if file.parent.exists() else []
        return f"{aside[-1]}: damaged" if aside else f"{file}: the file is missing"


def _read(file: Path, key: Key) -> StoredObject:
    """Read the object that belongs at a place of the folder.

    Raises:
        DamagedFile, OSError.
    """
    try:
        kept = json.loads(unseal(file.read_bytes()))
        resource, intents = kept["object"], kept["intents"]
        for problem in _problems(resource, intents, key):
            raise DamagedFile(problem)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedFile):
            raise
        raise DamagedFile(f"not an object of the embedded cluster ({error!r})") from error
    return StoredObject(resource, intents)


def _problems(resource: Object, intents: Mapping[str, Intent], key: Key) -> Iterator[str]:
    """Check what every object has that was written here: files of earlier versions have no checksum."""
    metadata = resource["metadata"]
    found = Key(resource["kind"], metadata["namespace"], metadata["name"])
    if key.kind not in KINDS:
        yield f"the kind {key.kind} is not known to this version"
    if found != key:
        yield f"it holds {'/'.join(map(str, found))}"
    if not isinstance(metadata["uid"], str) or not str(metadata["resourceVersion"]).isdigit():
        yield "its uid or resourceVersion cannot be read"
    if not isinstance(intents, dict):
        yield "what was applied cannot be read"


def _kept_as(file: Path, error: Exception) -> Path:
    """Set a damaged file aside and return its new path; one that the disk cannot read stays in its place."""
    if isinstance(error, OSError):
        return file
    try:
        return set_aside(file)
    except OSError as problem:
        log.warning("%s: damaged, and not renamed: %s", file, problem)
        return file


def _uids(lost: Mapping[Key, LostObject]) -> dict[Key, str]:
    return {key: found.uid for key, found in lost.items() if _is_listed(key)}


def _is_listed(key: Key) -> bool:
    return key.kind != "Event"
