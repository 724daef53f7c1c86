"""The devices that drivers publish and the claims that hold some, kept from four kinds of `resource.k8s.io`.

The sink of their informers, which run only where the API server has these kinds. It keeps a small value of each object
and builds a catalog when slices, classes or templates have changed; templates alone leave the verdicts about devices.

Owned by the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from stoker.operator.domain.placement.device_catalog import DeviceCatalog
from stoker.operator.domain.placement.device_claim import ClaimRequests, requests_of_template
from stoker.operator.domain.placement.device_members import DeviceMembers
from stoker.operator.domain.placement.device_selector import DeviceSelectors
from stoker.operator.domain.plan import Key, Object
from stoker.pod.resources.device import DeviceId, DeviceSlice, read_slice, usable_devices
from stoker.pod.resources.device_allocation import Claim, allocated_claim

DEVICE_KINDS = ("ResourceSlice", "DeviceClass", "ResourceClaimTemplate", "ResourceClaim")
_PART = "devices"
"""Name of the reduced value inside of a listed object."""
_NONE: Mapping[str, Claim] = {}


class DeviceWatch:
    """What the API server has of devices.

    Args:
        changed: called when more devices may be free than before, or other ones.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._found: dict[str, dict[Key, Any]] = {kind: {} for kind in DEVICE_KINDS}
        self._selectors = DeviceSelectors()
        self._members: DeviceMembers | None = None
        self._catalog: DeviceCatalog | None = None
        self._by_pod: dict[str, Mapping[str, Claim]] = {}
        self.seen: Callable[[], bool] = lambda: False
        """Whether every kind was listed."""

    @property
    def catalog(self) -> DeviceCatalog | None:
        """The present catalog; None while the devices are not known."""
        if self._catalog is None and self.seen():
            self._catalog = self._built()
        return self._catalog

    def allocated_to(self, pod_uid: str) -> Mapping[str, Claim]:
        """The claims of a pod that have their devices, by their names in the pod."""
        return self._by_pod.get(pod_uid, _NONE)

    def claims_of_others(self, pod_uids: Collection[str]) -> Iterator[Claim]:
        """Claims that have devices and belong to none of these pods."""
        claims: Iterable[Claim | None] = self._found["ResourceClaim"].values()
        return (claim for claim in claims if claim is not None and claim.pod_uid not in pod_uids)

    # The sink of the informers

    def pruned(self, resource: Object, _old: Object | None = None) -> Object:
        """The object reduced to its identity and what is counted of it."""
        names = ("name", "namespace", "uid", "resourceVersion")
        metadata = {name: resource["metadata"][name] for name in names if name in resource["metadata"]}
        return {"kind": resource["kind"], "metadata": metadata, _PART: _READ[resource["kind"]](resource)}

    def put(self, resource: Object) -> bool:
        """Keep an object; True when that changed something."""
        kind, metadata = resource["kind"], resource["metadata"]
        value = resource[_PART] if _PART in resource else self.pruned(resource)[_PART]
        key = Key(kind, metadata.get("namespace", ""), metadata["name"])
        if key in self._found[kind] and self._found[kind][key] == value:
            return False
        self._replace(key, value)
        return True

    def remove(self, key: Key, _uid: str, _version: int | None = None, *, last: Object | None = None) -> bool:  # noqa: ARG002
        """Forget an object that is gone."""
        if key not in self._found[key.kind]:
            return False
        self._replace(key, None, gone=True)
        return True

    def forget_unlisted(self, kind: str, items: Iterable[Object], _version: int, _namespace: str | None = None) -> None:
        """Forget what a list lacks. Nothing else writes here, so nothing can be newer than the list."""
        listed = {(item["metadata"].get("namespace", ""), item["metadata"]["name"]) for item in items}
        for key in [key for key in self._found[kind] if (key.namespace, key.name) not in listed]:
            self._replace(key, None, gone=True)

    # Inside

    def _replace(self, key: Key, value: Any, *, gone: bool = False) -> None:
        before = self._found[key.kind].pop(key, None)
        if not gone:
            self._found[key.kind][key] = value
        if key.kind == "ResourceClaim":
            self._index(before, value)
        else:
            self._catalog = None
            self._members = self._members if key.kind == "ResourceClaimTemplate" else None
        self._changed()

    def _index(self, before: Claim | None, claim: Claim | None) -> None:
        """Keep the claims of each pod; a change replaces the mapping, so that readers can compare it by identity."""
        if before is not None and before.pod_uid:
            held = {name: found for name, found in self.allocated_to(before.pod_uid).items() if found is not before}
            self._by_pod.pop(before.pod_uid, None)
            if held:
                self._by_pod[before.pod_uid] = held
        if claim is not None and claim.pod_uid:
            self._by_pod[claim.pod_uid] = {**self.allocated_to(claim.pod_uid), claim.pod_claim: claim}

    def _built(self) -> DeviceCatalog:
        templates: dict[tuple[str, str], ClaimRequests] = {
            (key.namespace, key.name): value for key, value in self._found["ResourceClaimTemplate"].items()
        }
        if self._members is None:
            self._members = self._all_members(templates.values())
        return DeviceCatalog(self._members, templates, self._extended())

    def _extended(self) -> dict[str, str]:
        """The class of each extended resource; of classes that name the same one, the first by name."""
        classes: Iterable[tuple[Key, _Class]] = self._found["DeviceClass"].items()
        named = sorted(((key.name, found) for key, found in classes), reverse=True)
        return {found.extended: name for name, found in named if found.extended}

    def _all_members(self, templates: Iterable[ClaimRequests]) -> DeviceMembers:
        slices: Iterable[DeviceSlice] = self._found["ResourceSlice"].values()
        classes = {key.name: found.selectors for key, found in self._found["DeviceClass"].items()}
        devices = usable_devices(slices)
        asked = {text for found in templates for one, _ in found.counts for text in one.selectors}
        asked |= {text for selectors in classes.values() for text in selectors}
        known: set[DeviceId] = {device.id for found in devices.values() for device in found}
        self._selectors.keep(asked, known)
        return DeviceMembers(devices, classes, self._selectors)


class _Class(NamedTuple):
    """What is kept of a DeviceClass."""

    selectors: tuple[str, ...]
    extended: str
    """Name of the extended resource that its devices stand for; empty without one."""


def _class_of(found: Object) -> _Class:
    spec = found.get("spec") or {}
    selectors = tuple(str((one.get("cel") or {}).get("expression") or "") for one in spec.get("selectors") or ())
    return _Class(selectors, str(spec.get("extendedResourceName") or ""))


_READ: Mapping[str, Callable[[Object], Any]] = {
    "ResourceSlice": read_slice,
    "DeviceClass": _class_of,
    "ResourceClaimTemplate": requests_of_template,
    "ResourceClaim": allocated_claim,
}
