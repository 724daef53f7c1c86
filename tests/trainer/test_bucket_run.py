"""A run whose checkpoints are in a bucket: saved, kept, and resumed with the same bits as in a folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.checkpoint.verify import verify
from stoker.model.weights.source import open_weights
from stoker.trainer.rank.resume import choose_resume
from stoker.trainer.rank.skipped_batches import read_skipped, write_skipped
from testing.checkpoint.s3_server import S3Server
from testing.trainer.tiny_run import alone, tiny_config, train

URL = "s3://models/runs/tiny"


def state(root: Path) -> dict[str, np.ndarray]:
    found = CheckpointRoot(root).committed()[0]
    assert verify(found.path, found.digest).ok
    reader = CheckpointReader(found.path)
    return {name: np.asarray(reader.read(name)) for name in reader.manifest.tensors}


def test_a_run_in_a_bucket_is_that_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"checkpoint__interval_steps": 2, "checkpoint__max_to_keep": 2, "optimization__schedule": "constant"}
    with S3Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.fault = lambda number, _method: "cut" if number % 7 == 0 else ""
        train(tiny_config(tmp_path, **changes, checkpoint__root=URL, training__total_steps=4), alone())
        train(tiny_config(tmp_path, **changes, checkpoint__root=URL), alone())
        train(tiny_config(tmp_path, **changes), alone())
        bucket, folder = state(Path(URL)), state(tmp_path / "root")
        assert [found.step for found in CheckpointRoot(Path(URL)).committed()] == [6, 4]
        weights = open_weights(CheckpointRoot(Path(URL)).committed()[0].path)
        assert weights.config.num_layers == 2
        write_skipped(Path(URL), [5, 3])
        assert read_skipped(Path(URL)) == (3, 5)
    assert bucket.keys() == folder.keys()
    assert all(np.array_equal(value, folder[name]) for name, value in bucket.items())


def test_credentials_that_expire_at_the_start_send_no_run_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began at step 0, or at the save before, wherever the newest manifest could not be read."""
    config = tiny_config(tmp_path, checkpoint__root=URL, checkpoint__interval_steps=2, training__total_steps=4)
    with S3Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        train(config, alone())
        root = CheckpointRoot(Path(URL))
        server.requests = 0
        newest = choose_resume(config, root, alone().save_group, lambda _: None)
        assert newest is not None
        assert newest.folder.startswith("step-00000004")
        for first in range(1, 13):  # the list, both manifests, the first pieces
            server.requests = 0
            server.fault = lambda number, _method, first=first: "expired" if number >= first else ""  # type: ignore[misc]
            try:
                found = choose_resume(config, root, alone().save_group, lambda _: None)
            except PermissionError as error:
                assert str(error.filename).startswith(URL)  # noqa: PT017
            else:
                assert found == newest
