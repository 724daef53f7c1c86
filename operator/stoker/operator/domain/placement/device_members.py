"""The devices of each set: which are in a class, pass the selectors of a request, and have no taint in the way.

Made anew when devices or classes change. Verdicts are remembered, so that each set is looked for once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from stoker.operator.domain.placement.device_claim import DeviceSet
from stoker.operator.domain.placement.device_selector import DeviceSelectors
from stoker.pod.resources.device import Device, DeviceId
from stoker.pod.resources.taint import repels


class DeviceMembers:
    """The members of sets of devices.

    Args:
        devices: by node; those that several nodes reach have the empty name.
        classes: selectors of each DeviceClass.
    """

    def __init__(
        self,
        devices: Mapping[str, Sequence[Device]],
        classes: Mapping[str, Sequence[str]],
        selectors: DeviceSelectors,
    ) -> None:
        self.classes = classes
        self._devices, self._selectors = devices, selectors
        self._members: dict[DeviceSet, dict[str, frozenset[DeviceId]]] = {}
        self._undecided: dict[DeviceSet, bool] = {}

    def is_undecided(self, one: DeviceSet) -> bool:
        """Whether it is not known of some device whether it is in the set; it counts as one that is."""
        self.of(one)
        return self._undecided[one]

    def of(self, one: DeviceSet) -> dict[str, frozenset[DeviceId]]:
        """Return the devices of a set by node."""
        if one not in self._members:
            undecided = False
            members = {}
            for node, devices in self._devices.items():
                verdicts = {device.id: self._verdict(one, device) for device in devices}
                undecided |= None in verdicts.values()
                if ids := frozenset(found for found, verdict in verdicts.items() if verdict is not False):
                    members[node] = ids
            self._members[one], self._undecided[one] = members, undecided
        return self._members[one]

    def _verdict(self, one: DeviceSet, device: Device) -> bool | None:
        """Whether a device is in a set; None where a selector that may leave it out cannot be decided."""
        if repels(device.taints, json.loads(one.tolerations)):
            return False
        own = self._all(one.selectors, device)
        if own is False:
            return False
        verdicts = {self._all(self.classes.get(name, ("false",)), device) for name in one.classes}
        if True in verdicts:
            return None if own is None or device.divisible else True
        return None if None in verdicts else False

    def _all(self, expressions: Iterable[str], device: Device) -> bool | None:
        verdicts = {self._selectors.matches(expression, device) for expression in expressions}
        if False in verdicts:
            return False
        return None if None in verdicts else True
