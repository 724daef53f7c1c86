"""The route of `deploy/gateway-api` leads to the Service that a deployment gets, and to nothing else of it."""

from __future__ import annotations

from pathlib import Path

import yaml

from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.api.metadata import read
from stoker.operator.domain.settings import Settings
from stoker.operator.render.router import front_service
from testing.operator.bad_manifests import DEPLOYMENT, changed

EXAMPLE = Path("deploy/gateway-api/route.yaml")


def test_the_route_leads_to_the_service_of_the_deployment() -> None:
    gateway, route = yaml.safe_load_all(EXAMPLE.read_text())
    manifest = changed(DEPLOYMENT, {"metadata.name": "chat", "metadata.uid": "3b1f"})
    service = front_service(read(InferenceDeployment, manifest), manifest, Settings())
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend == {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
    (parent,) = route["spec"]["parentRefs"]
    listeners = [listener["name"] for listener in gateway["spec"]["listeners"]]
    assert (parent["name"], [parent["sectionName"]]) == (gateway["metadata"]["name"], listeners)
    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1/"]
