"""Whether two engines share a request, asked of them directly, as their router would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from stoker.pod.split_requests import PREFILL_HEADER
from testing.stories.waits import TIMEOUT_S

Pod = Mapping[str, Any]


def is_split(prefill: Pod, decode: Pod, model: str, prompt: str) -> bool:
    """Send a request as a router would; return whether the prefill engine has ever computed a prompt for the other.

    On a busy machine it may be too slow, and the decode engine computes the prompt: the answer is the same.
    """
    with httpx.Client(timeout=TIMEOUT_S) as client:
        body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        whole = client.post(f"{url_of(prefill)}/v1/completions", json=body)
        headers = {PREFILL_HEADER.decode(): peer_endpoint(client, prefill)}
        split = client.post(f"{url_of(decode)}/v1/completions", json=body, headers=headers)
        assert (whole.status_code, split.status_code) == (200, 200)
        assert split.json()["choices"][0]["text"] == whole.json()["choices"][0]["text"]
        transfer = client.get(f"{url_of(decode)}/metrics").text
    counted = [line for line in transfer.splitlines() if line.startswith("stoker_split_requests_total")]
    return any(float(line.rpartition(" ")[2]) for line in counted if '"split"' in line or '"prefill_only"' in line)


def peer_endpoint(client: httpx.Client, pod: Pod) -> str:
    """Return the address in the first of an engine's reports that has one: none has before the core's first word."""
    with client.stream("GET", f"{url_of(pod)}/load") as reports:
        found = (json.loads(line.removeprefix("data: ")) for line in reports.iter_lines() if line)
        return next(str(report["peer"]["endpoint"]) for report in found if report["peer"])


def url_of(pod: Pod) -> str:
    return f"http://{pod['status']['podIP']}:8000"


def paired(found: Mapping[str, Any]) -> bool:
    """Whether an InferenceDeployment is Serving with all its engines, and they form pairs."""
    status = found.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
    ready = (status.get("phase"), status.get("ready")) == ("Serving", "2/2")
    return ready and conditions.get("Disaggregated") == "True"
