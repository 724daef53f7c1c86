"""Paths of a TrainingJob that cannot be right in its pods: relative ones, and files that no volume would hold.

The root file system of a trainer's pod is read-only, so a path that is written needs a mount that can be written. What
is only read may also be part of the image. Volumes and mounts that `podTemplate` adds or changes count as well.

Pure; called by `reconcile/intent`. `stoker train` reads the same manifest with the paths of its machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from stoker.operator.domain.pods import MAIN

Section = Mapping[str, Any]

CHECKPOINT_FOLDER = "/var/stoker/checkpoints"
WORK_FOLDER = "/var/stoker/work"
SCRATCH = ("/tmp", WORK_FOLDER)
"""Empty folders of every trainer's pod, which are lost with it."""


def misplaced_paths(spec: Section) -> list[str]:
    """Return one line per path, with its field, its value and what is allowed.

    Args:
        spec: of a TrainingJob as stored, camelCase, with or without defaults.
    """
    written = dict(_written(spec))
    paths = {**dict(_read(spec)), **written}
    relative = {field for field, path in paths.items() if not path.startswith("/")}
    found = [
        f"spec.{field} {path} is relative; a path inside the pod starts with /"
        for field, path in paths.items()
        if field in relative
    ]
    if _root_is_writable(spec):
        return found
    lines = (_not_writable(f"spec.{field}", path, spec) for field, path in written.items() if field not in relative)
    return found + [line for line in lines if line]


def _read(spec: Section) -> Iterator[tuple[str, str]]:
    """(field, path) of what a run reads."""
    data, start = spec.get("data") or {}, spec.get("modelFrom") or {}
    sources = {f"data.sources {source['name']}: path": source for source in data.get("sources") or ()}
    sources["data.validation.source.path"] = (data.get("validation") or {}).get("source")
    sources["data.tokenizer.path"] = data.get("tokenizer")
    sources["modelFrom.huggingFace.path"] = start.get("huggingFace")
    sources["modelFrom.gguf.path"] = start.get("gguf")
    for field, section in sources.items():
        if section and section.get("path"):
            yield field, section["path"]


def _written(spec: Section) -> Iterator[tuple[str, str]]:
    """(field, path) of what a run writes, beside its checkpoints."""
    logging = spec.get("logging") or {}
    found = {
        "data.cacheDir": (spec.get("data") or {}).get("cacheDir"),
        "memory.nvmeOffload.path": ((spec.get("memory") or {}).get("nvmeOffload") or {}).get("path"),
        "logging.jsonl": logging.get("jsonl"),
        "logging.tensorboard": logging.get("tensorboard"),
        "logging.mlflow.trackingUri": _file_store((logging.get("mlflow") or {}).get("trackingUri")),
    }
    yield from ((field, path) for field, path in found.items() if path)


def _file_store(uri: str | None) -> str | None:
    """The folder that a tracking URI names; None for a server."""
    if uri is None:
        return None
    if uri.startswith("file:"):
        return "/" + uri.removeprefix("file:").lstrip("/")
    return uri if uri.startswith(("/", ".")) else None


def _root_is_writable(spec: Section) -> bool:
    """Whether `podTemplate` lets the program write into its own file system."""
    context = _template(spec.get("workers") or {}, MAIN).get("securityContext")
    return isinstance(context, Mapping) and context.get("readOnlyRootFilesystem") is False


def _template(pods: Section, container: str | None = None) -> Section:
    """The `podTemplate`'s spec, or what it says of one container; empty where it says nothing."""
    found = (pods.get("podTemplate") or {}).get("spec")
    if not isinstance(found, Mapping):
        return {}
    if container is None:
        return found
    return next((item for item in _items(found, "containers") if item.get("name") == container), {})


def _items(section: Section, name: str) -> list[Section]:
    """The objects of a list that users write freely."""
    found = section.get(name)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list | tuple) else []


def _merged(own: list[Section], template: list[Section], key: str) -> dict[str, Section]:
    """Objects by a member, those of the template over the others, as pods are rendered."""
    found = {str(item[key]): item for item in own}
    for item in template:
        name = str(item.get(key))
        found[name] = {**found.get(name, {}), **item}
    return found


def _not_writable(field: str, path: str, spec: Section) -> str | None:
    """The line for a path that the run cannot write."""
    mounts = _mounts(spec)
    around = [mount for mount in mounts if PurePosixPath(path).is_relative_to(mount)]
    allowed = ", ".join(mount for mount, writable in mounts.items() if writable)
    if not around:
        return f"{field} {path} is below no volumeMount, and the pod's root is read-only; can be written: {allowed}"
    mount = max(around, key=len)
    return None if mounts[mount] else f"{field} {path} is below {mount}, which is read-only; can be written: {allowed}"


def _mounts(spec: Section) -> dict[str, bool]:
    """Mount path -> whether the run can write there."""
    storage = (spec.get("checkpoint") or {}).get("storage") or {}
    own = (*SCRATCH, *([CHECKPOINT_FOLDER] if storage.get("claimName") else []))
    return {**mounts_of(spec.get("workers") or {}), **dict.fromkeys(own, True)}


def mounts_of(pods: Section) -> dict[str, bool]:
    """Mount path -> whether it can be written, of the volumes that a user gives to pods.

    Args:
        pods: `workers` of a job, or a pool: volumes, volumeMounts, podTemplate.
    """
    volumes = _merged(_items(pods, "volumes"), _items(_template(pods), "volumes"), "name")
    mounts = _merged(_items(pods, "volumeMounts"), _items(_template(pods, MAIN), "volumeMounts"), "mountPath")
    return {
        path.rstrip("/") or "/": not (mount.get("readOnly") or _is_read_only(volumes.get(str(mount.get("name"))) or {}))
        for path, mount in mounts.items()
    }


def _is_read_only(volume: Section) -> bool:
    claim = volume.get("persistentVolumeClaim") or {}
    return bool(claim.get("readOnly") or volume.get("configMap") or volume.get("secret"))
