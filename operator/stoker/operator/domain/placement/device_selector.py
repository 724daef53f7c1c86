"""Selectors of devices: CEL expressions of DeviceClasses and claims over one device.

Most are decided by the library that also runs the rules of our kinds. `quantity(...)` in comparisons is rewritten to a
number. What the library lacks (semver, other functions of Kubernetes) is not decided, and counts as unknown.
"""

from __future__ import annotations

import re
from typing import Any

from stoker.pod.resources.device import Device, DeviceId
from stoker.pod.resources.quantity import amount

_COMPARED = re.compile(r"""\.compareTo\(\s*quantity\(\s*(["'])([^"']+)\1\s*\)\s*\)(?=\s*(?:>=|<=|>|<|==|!=)\s*0\b)""")
_DOMAIN = re.compile(r"""(?:attributes|capacity)\s*\[\s*(["'])([^"']+)\1\s*\]""")


class DeviceSelectors:
    """Verdicts of selectors, each computed once: devices do not change, a driver publishes others.

    The cache grows with what is asked; `keep` drops what is gone.
    """

    def __init__(self) -> None:
        self._environment: Any = None
        """Made with the first selector: a cluster without any does not pay for the library (8 MB)."""
        self._programs: dict[str, Any] = {}
        self._verdicts: dict[str, dict[DeviceId, tuple[Device, bool | None]]] = {}

    def matches(self, expression: str, device: Device) -> bool | None:
        """Whether the expression holds for the device; None where that cannot be decided."""
        verdicts = self._verdicts.setdefault(expression, {})
        known = verdicts.get(device.id)
        if known is None or known[0] is not device:
            known = verdicts[device.id] = (device, self._evaluate(expression, device))
        return known[1]

    def keep(self, expressions: set[str], devices: set[DeviceId]) -> None:
        """Forget the verdicts of other expressions and devices."""
        self._verdicts = {
            expression: {name: found for name, found in verdicts.items() if name in devices}
            for expression, verdicts in self._verdicts.items()
            if expression in expressions
        }

    def _evaluate(self, expression: str, device: Device) -> bool | None:
        program = self._program(expression)
        if program is None:
            return None
        domains: dict[str, Any] = {match[2]: {} for match in _DOMAIN.finditer(expression)}
        own: dict[str, Any] = {device.id.driver: {}}
        data = {
            "driver": device.id.driver,
            "attributes": {**domains, **own, **device.attributes},
            "capacity": {**domains, **own, **device.capacity},
        }
        verdict = program.eval(data={"device": data}).value()
        return verdict if isinstance(verdict, bool) else None

    def _program(self, expression: str) -> Any:
        if expression not in self._programs:
            if self._environment is None:
                self._environment = _environment()
            try:
                self._programs[expression] = self._environment.compile(_COMPARED.sub(_as_difference, expression))
            except (RuntimeError, ValueError):
                self._programs[expression] = None
        return self._programs[expression]


def _environment() -> Any:
    from cel_expr_python import cel
    from cel_expr_python.ext import ext_strings

    return cel.NewEnv(variables={"device": cel.Type.DYN}, extensions=[ext_strings.ExtStrings()])


def _as_difference(match: re.Match[str]) -> str:
    return f" - {amount('quantity', match[2])}"
