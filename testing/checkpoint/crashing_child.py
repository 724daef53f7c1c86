"""Processes that are killed while they save or delete a checkpoint: `crashing_child.py ROOTS ACTION COUNT`.

A fork of its own works on root number n and dies at operation n; the exit statuses are printed, one per line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stoker.checkpoint.store import CheckpointRoot
from testing.checkpoint.crashing_storage import Countdown, CrashingStorage
from testing.checkpoint.synthetic import SMALL, flat_bucket, make_state, save


def main() -> None:
    roots, action, count = sys.argv[1:]
    for operations in range(int(count)):
        child = os.fork()
        if child == 0:
            work(Path(roots) / str(operations), action, operations)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def work(folder: Path, action: str, operations: int) -> None:
    root = CheckpointRoot(folder, storage=CrashingStorage(Countdown(operations, torn=True)))
    if action == "save":
        state = make_state(SMALL, seed=2)
        save(root, state, step=2, cut=flat_bucket, ranks=2, piece_bytes=256, files={"config.json": b"{}"})
    else:
        found = root.committed()[-1]
        root.delete(found.folder_name, found.digest)


if __name__ == "__main__":
    main()
