"""The commands `push` and `pull`: models to and from the hub, buckets and registries.

Added to the program by `command`, which owns errors and output; no logic of the transfer is here.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from stoker.checkpoint.entries import MANIFEST_FILE
from stoker.checkpoint.errors import CheckpointError, CheckpointExists
from stoker.checkpoint.export import Dtype, export_hugging_face
from stoker.checkpoint.place import storage_of
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.remote.model_cache import OnProgress, fetch_model
from stoker.checkpoint.remote.model_uri import parse_model_uri
from stoker.checkpoint.remote.push import OnFile, Pushed, push_folder


def push(folder: Path, uri: str, *, dtype: Dtype, replace: bool, work: Path | None, sent: OnFile) -> Pushed:
    """Push a checkpoint in the form of Hugging Face, adapters merged; a folder that has this form already as it is.

    Raises:
        CheckpointError: the folder holds no model, the URI is wrong, or what arrived differs.
        OSError: the disk or the other side fails.
    """
    parse_model_uri(uri)
    if (folder / "config.json").is_file() and not (folder / MANIFEST_FILE).is_file():
        return push_folder(folder, uri, replace=replace, sent=sent)
    try:
        names = storage_of(folder).names(folder)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} does not exist") from error
    if MANIFEST_FILE not in names:
        raise CheckpointError(f"{folder} is neither a checkpoint ({MANIFEST_FILE}) nor a Hugging Face folder")
    with tempfile.TemporaryDirectory(prefix="stoker-push-", dir=work) as scratch:
        out = Path(scratch) / "model"
        export_hugging_face(CheckpointReader(folder), out, dtype=dtype)
        return push_folder(out, uri, replace=replace, sent=sent)


def pull(uri: str, out: Path, progress: OnProgress) -> dict[str, object]:
    """Fetch a model into a new folder. What a pull that ended too early has fetched is in a hidden folder beside it.

    Raises:
        CheckpointError: the folder exists, the URI is wrong, or the model is missing or damaged.
        OSError: the disk or the other side fails.
    """
    if out.exists():
        raise CheckpointExists(f"{out} exists; a pull makes a new folder")
    cache = out.absolute().with_name(f".{out.name}.pull")
    found = fetch_model(uri, cache, progress=progress)
    try:
        folder = found.path.parent if found.path.is_file() else found.path
        folder.rename(out)
        shutil.rmtree(cache)
    finally:
        os.close(found.lease)
    return {"folder": str(out), "uri": uri, "digest": found.digest, "bytes": found.bytes}


def pushed_facts(pushed: Pushed) -> dict[str, object]:
    """The facts of a push for programs."""
    return asdict(pushed)
