"""Admission of Kubernetes' own kinds and of every object's metadata. What cannot run here is refused by name.

Pure checks, called by the object store (`objects`) before it stores an object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from stoker.operator.cluster.interface import Invalid
from stoker.operator.cluster.kinds import KINDS
from stoker.operator.domain.plan import Object

VOLUME_KINDS = ("configMap", "secret", "emptyDir", "persistentVolumeClaim", "hostPath")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_POD_EXTRAS = ("initContainers", "ephemeralContainers")
_MUTABLE_POD_FIELDS = ("schedulingGates", "nodeName", "activeDeadlineSeconds", "terminationGracePeriodSeconds")
_MUTABLE_WHILE_GATED = ("affinity", "nodeSelector", "tolerations")


def check_identity(body: Object) -> None:
    """Check kind, apiVersion, name and namespace. Raises Invalid."""
    kind = KINDS.get(str(body.get("kind")))
    if kind is None:
        raise Invalid(f"kind: {body.get('kind')!r} is not known here, known are {', '.join(KINDS)}")
    if body.get("apiVersion") != kind.api_version:
        raise Invalid(f"apiVersion: {kind.name} needs {kind.api_version}, got {body.get('apiVersion')!r}")
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping):
        raise Invalid("metadata: a map is needed")
    for field in ("name", "namespace"):
        value = metadata.get(field)
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise Invalid(f"metadata.{field}: a lower-case DNS name is needed, got {value!r}")
    for field in ("labels", "annotations"):
        for name, value in (metadata.get(field) or {}).items():
            if not isinstance(value, str):
                raise Invalid(f"metadata.{field}.{name}: a string is needed, got {value!r}")


def admit_builtin(new: Object, old: Object | None) -> Object:
    """Check an object of one of Kubernetes' kinds. Raises Invalid, naming the field and what is allowed."""
    if new["kind"] == "Pod":
        for problem in _pod_problems(new.get("spec") or {}):
            raise Invalid(f"Pod {new['metadata']['name']}: {problem}")
        if old is not None:
            _check_pod_update(new, old)
    if new["kind"] in ("ConfigMap", "Secret"):
        _check_data(new)
    return new


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
