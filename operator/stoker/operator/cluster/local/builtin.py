"""Admission of Kubernetes' own kinds. What cannot run here is refused by name.

Pure checks, called by the object store (`objects`) before it stores an object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.operator.cluster.interface import Invalid
from stoker.operator.cluster.kinds import KINDS
from stoker.operator.cluster.local.object_metadata import check_metadata
from stoker.operator.domain.plan import Object

VOLUME_KINDS = ("configMap", "secret", "emptyDir", "persistentVolumeClaim", "hostPath")
_MAPS: Mapping[str, tuple[str, ...]] = {
    "Pod": ("spec",),
    "Service": ("spec", "spec.selector"),
    "PersistentVolumeClaim": ("spec",),
    "ConfigMap": ("data", "binaryData"),
    "Secret": ("data", "stringData"),
}
"""Fields that are maps, by kind."""
_LISTS: Mapping[str, tuple[str, ...]] = {"Pod": ("spec.containers", "spec.volumes"), "Service": ("spec.ports",)}
"""Fields that are lists of maps, by kind."""
_POD_EXTRAS = ("initContainers", "ephemeralContainers")
_MUTABLE_POD_FIELDS = ("schedulingGates", "nodeName", "activeDeadlineSeconds", "terminationGracePeriodSeconds")
_MUTABLE_WHILE_GATED = ("affinity", "nodeSelector", "tolerations")


def check_identity(body: Object) -> None:
    """Check kind, apiVersion and metadata. Raises Invalid."""
    kind = KINDS.get(str(body.get("kind")))
    if kind is None:
        raise Invalid(f"kind: {body.get('kind')!r} is not known here, known are {', '.join(KINDS)}")
    if body.get("apiVersion") != kind.api_version:
        raise Invalid(f"apiVersion: {kind.name} needs {kind.api_version}, got {body.get('apiVersion')!r}")
    check_metadata(body.get("metadata"))


def admit_builtin(new: Object, old: Object | None) -> Object:
    """Check an object of one of Kubernetes' kinds. Raises Invalid, naming the field and what is allowed."""
    for problem in _type_problems(new):
        raise Invalid(f"{new['kind']} {new['metadata']['name']}: {problem}")
    if new["kind"] == "Pod":
        for problem in _pod_problems(new.get("spec") or {}):
            raise Invalid(f"Pod {new['metadata']['name']}: {problem}")
        if old is not None:
            _check_pod_update(new, old)
    if new["kind"] in ("ConfigMap", "Secret"):
        _check_data(new)
    return new


def _type_problems(body: Object) -> Iterator[str]:
    for path in _MAPS.get(body["kind"], ()):
        value = _at(body, path)
        if not isinstance(value, Mapping) and (value is not None or path == "spec"):
            yield f"{path}: a map is needed, got {value!r}"
    for path in _LISTS.get(body["kind"], ()):
        value = _at(body, path)
        if not isinstance(value, list | None) or not all(isinstance(item, Mapping) for item in value or ()):
            yield f"{path}: a list of maps is needed, got {value!r}"
    if body["kind"] == "Service":
        for index, port in enumerate(_at(body, "spec.ports") or ()):
            if not isinstance(port.get("port"), int) or not 0 < port["port"] < 65536:
                yield f"spec.ports[{index}].port: a number from 1 to 65535 is needed, got {port.get('port')!r}"


def _at(body: Any, path: str) -> Any:
    """The value at a path; None where a map on the way is absent."""
    for name in path.split("."):
        body = body.get(name) if isinstance(body, Mapping) else None
    return body


def _pod_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    for field in _POD_EXTRAS:
        if spec.get(field):
            yield f"not supported yet: spec.{field}"
    containers = spec.get("containers") or []
    if len(containers) != 1:
        yield f"not supported yet: spec.containers with {len(containers)} entries (no sidecars), exactly one is allowed"
        return
    if spec.get("restartPolicy", "Always") != "Never":
        yield f"not supported yet: spec.restartPolicy {spec.get('restartPolicy', 'Always')}, only Never is allowed"
    if not containers[0].get("command"):
        yield "spec.containers[0].command is needed: images are not run here, so an image's entry point is not known"
    for index, volume in enumerate(spec.get("volumes") or []):
        kinds = [kind for kind in volume if kind != "name"]
        if len(kinds) != 1 or kinds[0] not in VOLUME_KINDS:
            found = f"spec.volumes[{index}] ({volume.get('name')}) of kind {', '.join(kinds) or 'none'}"
            yield f"not supported yet: {found}, allowed are {', '.join(VOLUME_KINDS)}"
    yield from _container_problems(containers[0], {volume.get("name") for volume in spec.get("volumes") or []})


def _container_problems(container: Mapping[str, Any], volumes: set[Any]) -> Iterator[str]:
    for mount in container.get("volumeMounts") or []:
        if mount.get("name") not in volumes:
            yield f"spec.containers[0].volumeMounts: no volume is named {mount.get('name')!r}"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        kinds = [kind for kind in container.get(probe) or {} if kind in ("exec", "grpc", "tcpSocket")]
        if kinds:
            yield f"not supported yet: spec.containers[0].{probe}.{kinds[0]}, only httpGet is allowed"
    for hook in container.get("lifecycle") or {}:
        yield f"not supported yet: spec.containers[0].lifecycle.{hook}"


def _check_pod_update(new: Object, old: Object) -> None:
    gated = bool(old["spec"].get("schedulingGates"))
    allowed = {*_MUTABLE_POD_FIELDS, *(_MUTABLE_WHILE_GATED if gated else ())}
    for field in {*new["spec"], *old["spec"]} - allowed:
        if new["spec"].get(field) != old["spec"].get(field):
            raise Invalid(f"Pod {new['metadata']['name']}: spec.{field} cannot be changed")
    gates = new["spec"].get("schedulingGates") or []
    if any(gate not in (old["spec"].get("schedulingGates") or []) for gate in gates):
        raise Invalid(f"Pod {new['metadata']['name']}: spec.schedulingGates can only be removed")


def _check_data(body: Object) -> None:
    for name, value in (body.get("data") or {}).items():
        if not isinstance(value, str) or not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", name) or name.strip(".") == "":
            raise Invalid(
                f"{body['kind']} {body['metadata']['name']}: data.{name}: a plain file name and a string are needed"
            )
