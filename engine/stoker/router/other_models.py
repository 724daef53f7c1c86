"""The models of other deployments that this endpoint serves too: which model a request names, and where that is served.

A request is passed on once: what comes from another deployment's endpoint is for this deployment's own engines.

Made by `Backends` from a snapshot; `ByModel` asks it. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.pod.marked_streams import RESUME_HEADER
from stoker.router.backend import Timeouts
from stoker.router.connection import Outgoing
from stoker.router.endpoint import Endpoint
from stoker.router.request_fields import fields_of, with_model
from stoker.router.snapshot import BackendSnapshot, OtherModel

PASSED_ON_HEADER = b"x-stoker-passed-on"
"""On a request: the deployment whose endpoint passed it on. On an answer: the deployment that gave it."""


@dataclass(frozen=True)
class Other:
    """One model of another deployment."""

    entry: OtherModel
    endpoint: Endpoint | None
    """None: `entry.problem` says why."""


class OtherModels:
    """Names of models: those of the own engines, and those of other deployments."""

    def __init__(self, snapshot: BackendSnapshot, times: Timeouts, clock: Callable[[], float]) -> None:
        self.own = snapshot.own_models
        self.by_name: Mapping[str, Other] = {
            entry.name: Other(entry, Endpoint(entry.endpoint, times, clock) if entry.endpoint is not None else None)
            for entry in snapshot.models
        }

    def status(self) -> list[Mapping[str, Any]]:
        """Return the field `models` of `/status`."""
        return [
            {"name": name, "deployment": other.entry.deployment, "problem": other.entry.problem}
            for name, other in self.by_name.items()
        ]


def was_passed_on(request: Outgoing) -> bool:
    """Whether another deployment's endpoint sent the request here."""
    return any(name == PASSED_ON_HEADER for name, _ in request.headers)


def asked_model(request: Outgoing) -> str | None:
    """The field `model` of a JSON body; None where there is none. The engine refuses what should have one."""
    found = fields_of(request.body)
    name = found.get("model") if found is not None else None
    return name if isinstance(name, str) else None


def for_deployment(request: Outgoing, model: str, own: str) -> Outgoing:
    """The request as another deployment gets it; the body is the client's own where that serves the same name.

    Args:
        model: the name of the model there.
        own: name of the deployment that passes it on.
    """
    body = request.body
    fields = fields_of(body)
    if fields is not None and fields.get("model") not in (None, model):
        body = with_model(fields, model)
    kept = [(name, value) for name, value in request.headers if name != RESUME_HEADER]
    return replace(request, headers=[*kept, (PASSED_ON_HEADER, own.encode())], body=body)
