"""A pod's volumes as folders. ConfigMaps and Secrets are written out for this machine and follow later changes.

Called by `pod_command` at a start, and by `pod_life` when an object changes.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stoker.operator.domain.plan import Key, Object

LOCAL_FOLDER = "stoker.dev/local-folder"
"""Annotation of a PersistentVolumeClaim: the folder of this machine that it stands for."""

Find = Callable[[Key], Object | None]
RewriteFile = Callable[[str, str], str]
"""(file name, content) -> content."""


class MountError(Exception):
    """A volume cannot be made yet; the message names what is missing, as a pod's waiting message does."""


class PodVolumes:
    """The folders of one pod: `v/<name>` below its own folder, or the claim's, or the host's."""

    def __init__(self, pod: Object, folder: Path, claims: Path, find: Find) -> None:
        self.pod = pod
        self.folder = folder
        self.claims = claims
        self.find = find

    @property
    def termination_log(self) -> Path:
        return self.folder / "termination-log"

    def sources(self) -> set[Key]:
        """List the ConfigMaps, Secrets and claims that the volumes are made from."""
        namespace = self.pod["metadata"]["namespace"]
        kinds = {
            "configMap": ("ConfigMap", "name"),
            "secret": ("Secret", "secretName"),
            "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
        }
        found = set()
        for volume in self.pod["spec"].get("volumes") or ():
            for field, (kind, name) in kinds.items():
                if field in volume:
                    found.add(Key(kind, namespace, volume[field][name]))
        return found

    def paths(self) -> dict[str, str]:
        """Map each path in the container to the path on this machine."""
        container = self.pod["spec"]["containers"][0]
        found = {container.get("terminationMessagePath", "/dev/termination-log"): str(self.termination_log)}
        places = {volume["name"]: self._place(volume) for volume in self.pod["spec"].get("volumes") or ()}
        for mount in container.get("volumeMounts") or ():
            place = places[mount["name"]]
            inside = mount.get("subPath")
            found[mount["mountPath"].rstrip("/") or "/"] = str(place / inside if inside else place)
        return found

    def prepare(self, rewrite: RewriteFile) -> None:
        """Make every folder and file.

        Raises:
            MountError: a ConfigMap, Secret, claim or host folder is missing.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.termination_log.touch(mode=0o600)
        for volume in self.pod["spec"].get("volumes") or ():
            self._prepare(volume, rewrite)

    def refresh(self, changed: Key, rewrite: RewriteFile) -> None:
        """Write a changed ConfigMap or Secret out again, file by file."""
        for volume in self.pod["spec"].get("volumes") or ():
            name = volume.get("configMap", {}).get("name") or volume.get("secret", {}).get("secretName")
            if name == changed.name and changed.kind in ("ConfigMap", "Secret"):
                self._prepare(volume, rewrite)

    def _place(self, volume: Mapping[str, Any]) -> Path:
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            return self._claim_folder(volume["persistentVolumeClaim"]["claimName"])
        return self.folder / "v" / str(volume["name"])

    def _claim_folder(self, name: str) -> Path:
        namespace = self.pod["metadata"]["namespace"]
        return claim_folder(self.find(Key("PersistentVolumeClaim", namespace, name)), self.claims / namespace / name)

    def _prepare(self, volume: Mapping[str, Any], rewrite: RewriteFile) -> None:
        place = self._place(volume)
        if "hostPath" in volume:
            _host_path(place, str(volume["hostPath"].get("type", "")))
        elif "persistentVolumeClaim" in volume:
            name = volume["persistentVolumeClaim"]["claimName"]
            if self.find(Key("PersistentVolumeClaim", self.pod["metadata"]["namespace"], name)) is None:
                raise MountError(f'persistentvolumeclaim "{name}" not found')
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for kind, field, name_field in (("ConfigMap", "configMap", "name"), ("Secret", "secret", "secretName")):
            if field in volume:
                self._write_files(place, kind, volume[field], str(volume[field][name_field]), rewrite)

    def _write_files(self, place: Path, kind: str, source: Mapping[str, Any], name: str, rewrite: RewriteFile) -> None:
        found = self.find(Key(kind, self.pod["metadata"]["namespace"], name))
        if found is None:
            if source.get("optional"):
                return
            raise MountError(f'{kind.lower()} "{name}" not found')
        data = data_of(found)
        items = source.get("items")
        wanted = {item["path"]: item["key"] for item in items} if items else {key: key for key in data}
        for path, key in wanted.items():
            if key not in data:
                raise MountError(f'{kind.lower()} "{name}" has no key "{key}"')
            _replace(place / path, _rewritten(path, data[key], rewrite) if kind == "ConfigMap" else data[key])
        if not items:
            for stale in {file.name for file in place.iterdir() if file.is_file()} - set(wanted):
                (place / stale).unlink()


def claim_folder(claim: Object | None, default: Path) -> Path:
    """Folder of a claim's data."""
    annotations = (claim or {}).get("metadata", {}).get("annotations") or {}
    return Path(annotations[LOCAL_FOLDER]) if LOCAL_FOLDER in annotations else default


def data_of(source: Object) -> dict[str, bytes]:
    """Decode the files of a ConfigMap or Secret."""
    if source["kind"] == "ConfigMap":
        plain = {key: value.encode() for key, value in (source.get("data") or {}).items()}
        return plain | {key: _decoded(source, key, value) for key, value in (source.get("binaryData") or {}).items()}
    encoded = {key: _decoded(source, key, value) for key, value in (source.get("data") or {}).items()}
    return encoded | {key: value.encode() for key, value in (source.get("stringData") or {}).items()}


def _decoded(source: Object, key: str, value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise MountError(f"{source['kind'].lower()} {source['metadata']['name']}: {key} is not base64") from error


def _rewritten(path: str, content: bytes, rewrite: RewriteFile) -> bytes:
    try:
        return rewrite(path, content.decode()).encode()
    except UnicodeDecodeError:
        return content


def _replace(file: Path, content: bytes) -> None:
    """Replace a file so that readers see the old or the new content, never half of it."""
    if file.is_file() and file.read_bytes() == content:
        return
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.new")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
    new.replace(file)


def _host_path(path: Path, kind: str) -> None:
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    wrong = (kind == "Directory" and not path.is_dir()) or (kind == "File" and not path.is_file())
    if wrong or not path.exists():
        raise MountError(f"hostPath {path} is not there" + (f" as a {kind}" if kind else ""))
