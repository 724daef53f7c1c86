"""The global batches that a run leaves out, because they made the loss spike (`guards.loss_spike: Rewind`).

Batch b holds the samples from `b * global_batch_size` on. Step s trains the s-th batch that is not left out. The list
lies beside the checkpoints, because the next attempt resumes from a checkpoint that is older than the spike; every
later checkpoint has it in its lineage. Each order of batches has a list of its own: to another job at the same place,
and to the same one with another corpus, these numbers mean other samples.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from stoker.checkpoint.errors import CheckpointError
from stoker.checkpoint.manifest_file import read_whole
from stoker.checkpoint.place import storage_of
from stoker.checkpoint.storage import Storage
from stoker.trainer.errors import StorageFailed

MAX_BYTES = 1 << 20


def batch_of_step(step: int, skipped: Collection[int]) -> int:
    """The batch of step `step` (both from 0)."""
    batch = step
    for left_out in sorted(skipped):
        if left_out > batch:
            break
        batch += 1
    return batch


def left_out_before(batch: int, skipped: Collection[int]) -> int:
    """Count the batches in a row that end just before `batch` and are left out: its step was taken back so often."""
    count = 0
    while batch - count - 1 in skipped:
        count += 1
    return count


def list_file(root: Path, *order: object) -> Path:
    """The file of a list. `order`: what decides the samples of a batch, and whose run it is, as JSON has it."""
    digest = hashlib.blake2b(json.dumps(order, sort_keys=True).encode(), digest_size=4)
    return root / f"skipped-batches-{digest.hexdigest()}.json"


def read_skipped(file: Path) -> tuple[int, ...]:
    """The batches that earlier attempts of a run left out.

    Raises:
        StorageFailed: the file is not such a list. No checkpoint is to blame for it.
    """
    try:
        batches = json.loads(read_whole(storage_of(file.parent), file, MAX_BYTES))["batches"]
        if not all(type(batch) is int and batch >= 0 for batch in batches):
            raise ValueError("a batch is a number from 0 on")
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (CheckpointError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise StorageFailed(f"{file}: not a list of batches ({why}); repair it, or remove it to train all") from error
    return tuple(sorted(set(batches)))


def write_skipped(file: Path, batches: Iterable[int]) -> None:
    """Replace the list at once: after a crash it is the old one or the new one."""
    root, storage = file.parent, storage_of(file.parent)
    with suppress(FileExistsError):
        storage.make_folder(root)
    staged = root / f".{file.name}-{secrets.token_hex(4)}"
    try:
        _write(storage, staged, json.dumps({"batches": sorted(set(batches))}).encode())
        storage.rename(staged, file)
    except OSError:
        with suppress(OSError):
            storage.remove_file(staged)  # else each attempt on a full disk leaves one
        raise


def _write(storage: Storage, file: Path, content: bytes) -> None:
    sink = storage.create(file)
    try:
        sink.write(memoryview(content))
        sink.sync()
    finally:
        sink.close()
