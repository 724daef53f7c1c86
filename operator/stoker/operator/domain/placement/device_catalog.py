"""Devices as amounts that add up, like CPUs: what claims need, what nodes have, what pods take.

Every set of devices that a pod asks for is a resource by the name of the set, and so is every union of several sets of
one pod: pods with requests of n_i devices out of sets D_i fit as often as the unions of all choices of sets allow
(Hall, 1935: On representatives of subsets), so amounts of unions tell exactly how many fit, also where sets overlap.

Needs are lower limits where a claim has parts that are not understood; a selector that cannot be decided leaves every
device. A gang then is never held back for what is not understood: the scheduler decides.

Made by the loop of what the API server has; verdicts and sets are remembered, decisions are pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from types import MappingProxyType
from typing import Any

from stoker.operator.domain.placement.device_claim import (
    ClaimRequests,
    DeviceSet,
    PodClaims,
    claims_of_pod,
)
from stoker.operator.domain.placement.device_members import DeviceMembers
from stoker.pod.resources.device import DeviceId
from stoker.pod.resources.device_allocation import Claim

MAX_SETS = 4
"""Sets of one pod whose unions are all counted; of more the sets and the union of all."""
_Sets = frozenset[DeviceSet]


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """What a pod takes."""

    amounts: Mapping[str, int]
    doubts: tuple[str, ...] = ()
    """What is not counted, or not exactly."""


class DeviceCatalog:
    """The devices of all nodes, the classes and the templates of one moment.

    Args:
        devices: the devices of each set, by node.
        templates: by namespace and name.
        extended: the class of each extended resource that devices stand for (KEP-5004), counted under its name.
    """

    def __init__(
        self,
        devices: DeviceMembers,
        templates: Mapping[tuple[str, str], ClaimRequests],
        extended: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._devices, self._templates = devices, templates
        self.extended = frozenset(extended)
        self._needs: dict[PodClaims, DeviceNeeds] = {}
        self._keys: dict[str, _Sets] = {
            name: frozenset({DeviceSet((class_name,))}) for name, class_name in extended.items()
        }

    @property
    def version(self) -> int:
        """Grows with the sets that are counted."""
        return len(self._keys)

    def needs(self, claims: PodClaims | None) -> DeviceNeeds:
        """Return what one pod with these claims takes."""
        if claims is None:
            return DeviceNeeds({})
        if claims not in self._needs:
            self._needs[claims] = self._counted(claims)
        return self._needs[claims]

    def amounts_of(self, node: str) -> dict[str, int]:
        """Return how many devices of each counted set a node has, taken or not."""
        return {key: len(self._union(sets, node)) for key, sets in self._keys.items()}

    def taken_by_claim(self, claim: Claim) -> dict[str, dict[str, int]]:
        """Return what an allocated claim takes, by node."""
        taken: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for key, sets in self._keys.items():
            for node, ids in self._by_node(sets).items():
                if count := len(ids.intersection(claim.devices)):
                    taken[node][key] = count
        return dict(taken)

    def taken_by_pod(self, claims: PodClaims, allocated: Mapping[str, Claim], node: str) -> dict[str, int]:
        """Return what a pod on a node takes of each counted set.

        Args:
            allocated: its claims that have their devices, by their names in the pod. What the others will get is
                not known: they count in every set with a device that they may get.
        """
        held = {found for claim in allocated.values() for found in claim.devices}
        pending = [
            (one, count)
            for name, template in claims.templates
            if name not in allocated
            for one, count in self._template(claims.namespace, template).counts
        ]
        taken = {}
        for key, sets in self._keys.items():
            ids = self._union(sets, node)
            later = sum(
                count for one, count in pending if one in sets or ids & self._devices.of(one).get(node, frozenset())
            )
            if total := len(ids & held) + later:
                taken[key] = total
        return taken

    # Inside

    def _template(self, namespace: str, name: str) -> ClaimRequests:
        return self._templates.get((namespace, name)) or ClaimRequests()

    def _counted(self, claims: PodClaims) -> DeviceNeeds:
        doubts = [f"ResourceClaim {name} is not counted: several pods may use it" for name in claims.claims]
        missing = [name for _, name in claims.templates if (claims.namespace, name) not in self._templates]
        counts: Counter[DeviceSet] = Counter()
        for _, name in claims.templates:
            found = self._template(claims.namespace, name)
            doubts += found.doubts
            for one, count in found.counts:
                counts[one] += count
        missing_classes = sorted({name for one in counts for name in one.classes if name not in self._devices.classes})
        for one in [one for one in counts if {*one.classes} & {*missing_classes}]:
            del counts[one]
        for one in list(counts):
            if reason := self._doubt(one):
                doubts.append(reason)
            if self._on(one, ""):
                doubts.append(f"{one.text}: devices that several nodes reach are not counted")
                del counts[one]
        amounts = {f"ResourceClaimTemplate {name} (there is none)": 1 for name in missing}
        amounts |= {f"DeviceClass {name} (there is none)": 1 for name in missing_classes}
        for sets in _choices(list(counts)):
            key = " or ".join(sorted(one.text for one in sets))
            self._keys[key] = frozenset(sets)
            amounts[key] = sum(counts[one] for one in sets)
        return DeviceNeeds(amounts, tuple(dict.fromkeys(doubts)))

    def _doubt(self, one: DeviceSet) -> str:
        if not self._devices.is_undecided(one):
            return ""
        why = "a selector cannot be decided here, or several claims may share a device"
        return f"{one.text}: at most so many as are counted are free, since {why}"

    def _on(self, one: DeviceSet, node: str) -> frozenset[DeviceId]:
        return self._devices.of(one).get(node, frozenset())

    def _union(self, sets: _Sets, node: str) -> frozenset[DeviceId]:
        return frozenset(chain.from_iterable(self._on(one, node) for one in sets))

    def _by_node(self, sets: _Sets) -> dict[str, frozenset[DeviceId]]:
        nodes = {node for one in sets for node in self._devices.of(one)}
        return {node: self._union(sets, node) for node in nodes}


NOT_SEEN = (
    "the devices of resourceClaims are not counted, because the operator does not see them: name the nodes that have "
    "them by nodeSelector"
)


def needs_of(catalog: DeviceCatalog | None, namespace: str, spec: Mapping[str, Any]) -> DeviceNeeds:
    """Return what one pod takes of the devices of its claims; without a catalog nothing is counted, and told."""
    claims = claims_of_pod(namespace, spec)
    if claims is None:
        return DeviceNeeds({})
    return catalog.needs(claims) if catalog is not None else DeviceNeeds({}, (NOT_SEEN,))


def specs_of(resource: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the specs of the pods that a TrainingJob or an EnginePool makes."""
    rendered = ((resource.get("status") or {}).get("pinned") or {}).get("rendered") or {}
    templates = (one.get("template") or {} for one in (resource.get("spec") or {}).get("revisions") or ())
    for made in (rendered, *templates):
        if spec := (made.get("pod") or {}).get("spec"):
            yield spec


def _choices(sets: Sequence[DeviceSet]) -> Iterator[tuple[DeviceSet, ...]]:
    sizes = range(1, len(sets) + 1) if len(sets) <= MAX_SETS else (1, len(sets))
    for size in sizes:
        yield from combinations(sets, size)
