"""A checkpoint root: the folder that holds `step-00001200.<writer>` folders. Only this module publishes or deletes one.

A save is staged in a hidden folder, made durable, and renamed once. So a name that can be seen is complete, a crash
leaves at most a hidden folder, and two attempts never write the same name.

Called by the trainer's saver, by task pods, by the commands and by `stoker serve`.
"""

from __future__ import annotations

import errno
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from stoker.checkpoint.cover import cover_problems
from stoker.checkpoint.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointMissing,
)
from stoker.checkpoint.manifest import (
    MANIFEST_FILE,
    Manifest,
    folder_name,
    parse_folder_name,
)
from stoker.checkpoint.manifest_file import LATEST_FILE, read_manifest, read_whole
from stoker.checkpoint.place import storage_of
from stoker.checkpoint.storage import Storage

_STAGING = re.compile(r"\.staging-(step-[0-9]{8,12}\.([0-9a-f]{8}))-[0-9a-f]{8}")
_DELETING = ".deleting-"


@dataclass(frozen=True)
class Published:
    """A save that is durable and visible."""

    folder_name: str
    digest: str
    bytes: int
    files: int
    """Files of the folder without the manifest."""
    pieces: int


@dataclass(frozen=True)
class Found:
    """A committed checkpoint: its manifest is present and valid. Its data is not read yet."""

    folder_name: str
    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def writer(self) -> str:
        return self.manifest.writer

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def bytes(self) -> int:
        return self.manifest.bytes


@dataclass(frozen=True)
class Broken:
    """A folder with a checkpoint's name that is not committed, or of which that cannot be told."""

    folder_name: str
    path: Path
    error: CheckpointError | OSError
    """OSError: the storage failed, so the checkpoint may be as good as ever."""

    @property
    def step(self) -> int:
        step, _ = parse_folder_name(self.folder_name) or (0, "")
        return step

    @property
    def problem(self) -> str:
        return str(self.error)


@dataclass(frozen=True)
class Deleted:
    """The result of a delete. `left` names files that no manifest lists; they stay, and so does their folder."""

    folder_name: str
    files: tuple[str, ...]
    bytes: int
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Retained:
    """The result of retention: what it removed, and why it could not remove more. The next call tries again."""

    deleted: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class CheckpointRoot:
    """One folder of checkpoints. Holds no state of its own: everything is what lies on the disk."""

    def __init__(self, root: Path, *, storage: Storage | None = None) -> None:
        self.root = Path(root)
        self.storage = storage or storage_of(self.root)

    def begin(self, step: int, writer: str) -> Path:
        """Make a fresh staging folder for one save. Rank 0 calls it and sends the path to the other ranks.

        Raises:
            CheckpointExists: that step of that writer is published already.
        """
        name = folder_name(step, writer)
        self._check_unpublished(name)
        staging = self.root / f".staging-{name}-{secrets.token_hex(4)}"
        self.storage.make_folder(staging)
        return staging

    def publish(self, staging: Path, manifest: Manifest) -> Published:
        """Commit a save: check it, write the manifest last, make all durable, rename, hint `LATEST`.

        Every data file must have been closed (`PieceWriter.close`) before. Returns when the checkpoint would survive a
        power cut.

        Raises:
            CheckpointError: the staged files are not those of the manifest, or its pieces leave a gap or overlap.
            CheckpointExists: the name is published already.
        """
        name = manifest.folder_name
        self._check_staged(Path(staging), manifest)
        self._check_unpublished(name)
        self._write_new(Path(staging) / MANIFEST_FILE, manifest.to_json().encode())
        self.storage.sync_folder(Path(staging))
        self._rename_once(Path(staging), self.root / name)
        self.storage.sync_folder(self.root)
        self._hint(name)
        return Published(name, manifest.digest, manifest.bytes, len(manifest.file_sizes()), len(manifest.pieces))

    def discard(self, staging: Path) -> None:
        """Remove a staging folder after a save that failed. Never touches a published folder."""
        self._staged_name(Path(staging))
        for name in self.storage.names(Path(staging)):
            self.storage.remove_file(Path(staging) / name)
        self.storage.remove_folder(Path(staging))

    def discard_unfinished(self, writers: Collection[str] | None = None) -> list[str]:
        """Remove the staging folders of dead attempts by these writers.

        None, which only the holder of the lock may pass: those of all writers, and half-done deletes.

        Without the lock another process may be at that delete.
        """
        removed = []
        for name in self.storage.folders(self.root):
            match = _STAGING.fullmatch(name)
            if match and (writers is None or match[2] in writers):
                self.discard(self.root / name)
                removed.append(name)
        if writers is None:
            removed += [f"{_DELETING}{name}" for name in self._half_deleted() if self._resume_delete(name)]
            self._remove_stale_hints()
        return removed

    def scan(self) -> list[Found | Broken]:
        """Return every folder with a checkpoint's name, newest first."""
        items = [self._look(name) for name in self.storage.folders(self.root) if parse_folder_name(name)]
        return sorted(items, key=self._age, reverse=True)

    def committed(self) -> list[Found]:
        """Return the folders whose manifest is valid and carries their own step and writer, newest first."""
        return [item for item in self.scan() if isinstance(item, Found)]

    def find(self, name: str, digest: str | None = None) -> Found:
        """Return one committed checkpoint by name.

        Raises:
            CheckpointMissing: no such folder, or it has no manifest.
            CheckpointCorrupt: its manifest is not valid or not the wanted one.
        """
        check_folder_name(name)
        manifest = read_manifest(self.root / name, self.storage, digest)
        if manifest.folder_name != name:
            raise CheckpointCorrupt(f"{self.root / name}: its manifest is that of {manifest.folder_name}")
        return Found(name, self.root / name, manifest)

    def latest(self) -> Found | None:
        """Return the checkpoint that `LATEST` names; when that is missing, stale or wrong, the newest committed one."""
        with suppress(CheckpointError, OSError, UnicodeDecodeError):
            return self.find(read_whole(self.storage, self.root / LATEST_FILE, 4096).decode().strip())
        return next(iter(self.committed()), None)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the root for a run without an operator; the kernel releases it when the process dies.

        A bucket has no locks (`storage.has_locks`): each run needs a prefix of its own there.

        Raises:
            CheckpointLocked: another process holds it.
        """
        with self.storage.hold(self.root):
            yield

    def retain(self, keep: int, verified: Callable[[str], bool]) -> Retained:
        """Delete verified checkpoints beyond the `keep` newest verified ones, and finish half-done deletes.

        Only the holder of the lock may call it. `verified` is called once for each committed folder name. A checkpoint
        that is not verified neither counts nor is deleted; one that is being read stays for now.
        """
        if keep < 1:
            raise CheckpointError(f"keep must be >= 1, got {keep}")
        old = [found for found in self.committed() if verified(found.folder_name)][keep:]
        removals: dict[str, Callable[[], object]] = {
            **{name: partial(self._resume_delete, name) for name in self._half_deleted()},
            **{found.folder_name: partial(self._give_up, found) for found in old},
        }
        deleted, problems = [], []
        for name, remove in removals.items():
            try:
                if remove():
                    deleted.append(name)
            except (CheckpointError, OSError) as error:
                problems.append(f"{name}: {error}")
        return Retained(tuple(deleted), tuple(problems))

    def delete(self, name: str, digest: str) -> Deleted:
        """Remove exactly the files that the manifest with that digest lists, then the empty folder.

        It can be repeated after a crash: the folder first gets a hidden name, so a checkpoint that is half deleted
        cannot be found. It is unconditional: locks of readers are not checked.

        Raises:
            CheckpointCorrupt: the folder's manifest is not the one with that digest; nothing was removed.
        """
        check_folder_name(name)
        folders = self.storage.folders(self.root)
        if f"{_DELETING}{name}" not in folders:
            if name not in folders:
                return Deleted(name, (), 0)
            self._hide(name, digest)
        return self._delete_hidden(name, digest)

    def _give_up(self, found: Found) -> Deleted:
        """Delete a checkpoint that is not being read.

        The exclusive lock is held only until the folder is hidden: NFS keeps the name of a removed file that is open.
        """
        with self.storage.lock_exclusive(found.path / MANIFEST_FILE):
            self._hide(found.folder_name, found.digest)
        return self._delete_hidden(found.folder_name, found.digest)

    def _hide(self, name: str, digest: str) -> None:
        found = self.find(name).digest
        if found != digest:
            raise CheckpointCorrupt(f"{self.root / name}: its digest is {found}, not {digest}; nothing deleted")
        self.storage.rename(self.root / name, self.root / f"{_DELETING}{name}")
        self.storage.sync_folder(self.root)

    def _half_deleted(self) -> list[str]:
        folders = self.storage.folders(self.root)
        return [name.removeprefix(_DELETING) for name in folders if name.startswith(_DELETING)]

    def _delete_hidden(self, name: str, digest: str) -> Deleted:
        hidden = self.root / f"{_DELETING}{name}"
        if not self.storage.names(hidden):
            self.storage.remove_folder(hidden)
            return Deleted(name, (), 0)
        manifest = read_manifest(hidden, self.storage, digest)
        for file in manifest.file_sizes():
            self.storage.remove_file(hidden / file)
        self.storage.remove_file(hidden / MANIFEST_FILE)
        left = tuple(self.storage.names(hidden))
        if left:
            self.storage.rename(hidden, self.root / name)
        else:
            self.storage.remove_folder(hidden)
        self.storage.sync_folder(self.root)
        return Deleted(name, tuple(manifest.file_sizes()), manifest.bytes, left)

    def _resume_delete(self, name: str) -> bool:
        """Finish a delete that a crash interrupted. One whose manifest is not valid stays for a person to look at."""
        hidden = self.root / f"{_DELETING}{name}"
        try:
            digest = read_manifest(hidden, self.storage).digest if self.storage.names(hidden) else ""
        except CheckpointError:
            return False
        self._delete_hidden(name, digest)
        return True

    def _remove_stale_hints(self) -> None:
        """Remove hints that were written and never renamed to `LATEST`."""
        with suppress(FileNotFoundError):
            for name in self.storage.names(self.root):
                if name.startswith(f".{LATEST_FILE}-"):
                    self.storage.remove_file(self.root / name)

    def _look(self, name: str) -> Found | Broken:
        try:
            return self.find(name)
        except (CheckpointError, OSError) as error:
            return Broken(name, self.root / name, error)

    def _age(self, item: Found | Broken) -> tuple[int, float, str]:
        try:
            return item.step, self.storage.modified(item.path / MANIFEST_FILE), item.folder_name
        except OSError:
            return item.step, 0.0, item.folder_name

    def _check_unpublished(self, name: str) -> None:
        if name in self.storage.folders(self.root):
            raise CheckpointExists(f"{self.root / name} exists; a name is published once and never replaced")

    def _rename_once(self, staging: Path, target: Path) -> None:
        try:
            self.storage.rename(staging, target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise CheckpointExists(f"{target} exists; a name is published once and never replaced") from error
            raise

    def _staged_name(self, staging: Path) -> str:
        match = _STAGING.fullmatch(staging.name)
        if match is None or staging.parent != self.root:
            raise CheckpointError(f"{staging} is not a staging folder of {self.root}")
        return match[1]

    def _check_staged(self, staging: Path, manifest: Manifest) -> None:
        staged = self._staged_name(staging)
        if staged != manifest.folder_name:
            raise CheckpointError(f"{staging}: begun for {staged}, the manifest is for {manifest.folder_name}")
        problems = cover_problems(manifest)
        if problems:
            raise CheckpointError(f"{staged} is not published: {'; '.join(problems[:3])}")
        sizes = manifest.file_sizes()
        odd = sorted(sizes.keys() ^ set(self.storage.names(staging)))
        if odd:
            raise CheckpointError(
                f"{staged} is not published: files missing or not in the manifest: {', '.join(odd[:8])}"
            )
        for name, size in sizes.items():
            written = self.storage.size(staging / name)
            if written != size:
                raise CheckpointError(
                    f"{staged} is not published: {name} has {written} bytes, the manifest says {size}"
                )

    def _write_new(self, path: Path, data: bytes) -> None:
        sink = self.storage.create(path)
        try:
            sink.write(memoryview(data))
            sink.sync()
        finally:
            sink.close()

    def _hint(self, name: str) -> None:
        """Point `LATEST` at a checkpoint. Only a hint: the save counts even if this fails."""
        temporary = self.root / f".{LATEST_FILE}-{secrets.token_hex(4)}"
        try:
            self._write_new(temporary, f"{name}\n".encode())
            self.storage.rename(temporary, self.root / LATEST_FILE)
        except OSError:
            with suppress(OSError):
                self.storage.remove_file(temporary)


def check_folder_name(name: str) -> None:
    """Refuse anything but `step-00001200.1a2b3c4d`."""
    if parse_folder_name(name) is None:
        raise CheckpointMissing(f"{name!r} is not the name of a checkpoint (step-00001200.1a2b3c4d)")
