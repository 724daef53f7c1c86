"""Objects of the embedded cluster as `object_source` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.cli.exit_status import FAILED
from stoker.cli.local_endpoints import reached_from_here
from stoker.cli.local_options import ask
from stoker.cli.object_source import Missing
from stoker.cli.supervisor_client import NOT_FOUND, NotRunning, SupervisorClient, SupervisorError
from stoker.cli.targets import Target, fail
from stoker.operator.cluster.kinds import Kind


@dataclass(frozen=True)
class LocalSource:
    """The objects of one namespace of a supervisor; None: of all."""

    client: SupervisorClient
    namespace: str | None
    endpoints: bool = False
    """Show deployments with the address that this machine reaches, as tables do."""

    @property
    def place(self) -> str:
        return "any namespace" if self.namespace is None else f"namespace {self.namespace}"

    def listed(self, kind: Kind, labels: Mapping[str, str]) -> list[dict[str, Any]]:
        found = ask(lambda: self.client.objects(kind.name, namespace=self.namespace))
        return self._reached(kind, [item for item in found if labels.items() <= _labels(item).items()])

    def find(self, target: Target) -> dict[str, Any] | Missing:
        namespace = target.namespace or self.namespace
        try:
            found = self.client.objects(target.kind.name, namespace=namespace, name=target.name)
        except NotRunning as error:
            fail(str(error), FAILED)
        except SupervisorError as error:
            if error.status != NOT_FOUND:
                fail(str(error), FAILED)
            return Missing(str(error))
        return self._reached(target.kind, found)[0]

    def begin_deletion(self, found: dict[str, Any]) -> bool:
        metadata = found["metadata"]
        return ask(lambda: self.client.delete(found["kind"], metadata["namespace"], metadata["name"]))

    def is_gone(self, found: dict[str, Any]) -> bool:
        metadata = found["metadata"]
        now = ask(lambda: self.client.objects(found["kind"], namespace=metadata["namespace"]))
        return metadata["uid"] not in {one["metadata"]["uid"] for one in now}

    def _reached(self, kind: Kind, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return reached_from_here(self.client, found) if self.endpoints and kind.name == "InferenceDeployment" else found


def _labels(item: Mapping[str, Any]) -> Mapping[str, str]:
    return item["metadata"].get("labels") or {}
