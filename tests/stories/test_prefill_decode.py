"""The example of prefill and decode pools on an embedded cluster: engines pair up, and no answer is lost."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import yaml

from stoker.pod.split_requests import PREFILL_HEADER
from testing.stories.load import Load
from testing.stories.manifests import Manifest, claim
from testing.stories.story_cluster import Object, StoryCluster

NAME = "long-context"
EXAMPLE = Path(__file__).parents[2] / "examples" / "serve-prefill-decode" / "serve.yaml"
SMALL: dict[str, Any] = {
    "threads": 1,
    "cache": {"memoryBytes": 16 << 20},
    "scheduler": {"maxBatchTokens": 256, "maxRequests": 16, "maxModelLen": 256},
}
"""The test's engines; the example has the defaults, for a larger model."""
PROMPT = "Then the boiler met the captain. Then the captain met coal. Then steam met a whistle."


def example() -> Manifest:
    manifest: Manifest = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    manifest["spec"]["engine"] |= SMALL
    manifest["spec"]["router"]["service"] = {"port": 8000}
    return manifest


def test_engines_of_both_pools_pair_up_and_either_serves_alone(
    cluster: StoryCluster, taught: Path, tmp_path: Path
) -> None:
    models = tmp_path / "models"
    shutil.copytree(sorted(taught.glob("step-*"))[-1], models / "smollm2-135m-instruct")
    cluster.apply(claim("models", models), example())
    cluster.wait("InferenceDeployment", NAME, lambda found: serves(found) and paired(found), "serving in pairs")
    prefill, decode = engine(cluster, "prefill"), engine(cluster, "decode")
    tries = itertools.count()
    cluster.wait_until(lambda: is_split(prefill, decode, f"{PROMPT} {next(tries)}"), "a request that both compute")

    with Load(cluster.url(NAME), NAME, lengths=(16, 24, 100)) as load:
        more_answers(cluster, load)
        os.killpg(main_pid(prefill), signal.SIGKILL)
        cluster.wait_until(lambda: told(cluster)["reason"] == "NoPrefillEngine", "told")
        more_answers(cluster, load)
        cluster.wait("InferenceDeployment", NAME, lambda found: serves(found) and paired(found), "in pairs again")
        os.killpg(main_pid(decode), signal.SIGKILL)
        cluster.wait_until(lambda: told(cluster)["reason"] == "NoDecodeEngine", "told")
        more_answers(cluster, load)
    assert load.failures == []
    same = {(answer.tokens, answer.text) for answer in load.answers}
    assert len(same) == len(set(load.lengths)), "greedy answers depend on nothing but the model"

    cluster.delete("InferenceDeployment", NAME)
    cluster.wait_until(lambda: not cluster.all("Secret") and not cluster.pods(role="engine"), "pools and key gone")


def is_split(prefill: Object, decode: Object, prompt: str) -> bool:
    """Send a request as a router would; return whether the prefill engine has ever computed a prompt.

    On a busy machine it may be too slow, and the decode engine computes the prompt: the answer is the same.
    """
    with httpx.Client(timeout=60) as client:
        body = {"model": NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        whole = client.post(f"{url_of(prefill)}/v1/completions", json=body)
        headers = {PREFILL_HEADER.decode(): peer_endpoint(client, prefill)}
        split = client.post(f"{url_of(decode)}/v1/completions", json=body, headers=headers)
        assert (whole.status_code, split.status_code) == (200, 200)
        assert split.json()["choices"][0]["text"] == whole.json()["choices"][0]["text"]
        transfer = client.get(f"{url_of(decode)}/metrics").text
    counted = [line for line in transfer.splitlines() if line.startswith("stoker_split_requests_total")]
    return any(float(line.rpartition(" ")[2]) for line in counted if '"split"' in line or '"prefill_only"' in line)


def peer_endpoint(client: httpx.Client, pod: Object) -> str:
    """Return the address in the first of an engine's reports that has one: none has before the core's first word."""
    with client.stream("GET", f"{url_of(pod)}/load") as reports:
        found = (json.loads(line.removeprefix("data: ")) for line in reports.iter_lines() if line)
        return next(str(report["peer"]["endpoint"]) for report in found if report["peer"])


def url_of(pod: Object) -> str:
    return f"http://{pod['status']['podIP']}:8000"


def engine(cluster: StoryCluster, pool: str) -> Object:
    (pod,) = cluster.pods(role="engine", pool=pool)
    return pod


def told(cluster: StoryCluster) -> Object:
    return cluster.condition("InferenceDeployment", NAME, "Disaggregated")


def paired(found: Object) -> bool:
    conditions = {each["type"]: each["status"] for each in (found.get("status") or {}).get("conditions", ())}
    return conditions.get("Disaggregated") == "True"


def serves(found: Object) -> bool:
    status = found.get("status") or {}
    return (status.get("phase"), status.get("ready")) == ("Serving", "2/2")


def main_pid(pod: Object) -> int:
    """Return the pid of the program, which leads the pod's process group."""
    return int(pod["status"]["containerStatuses"][0]["containerID"].removeprefix("process://"))


def more_answers(cluster: StoryCluster, load: Load) -> None:
    wanted = len(load.answers) + 6
    cluster.wait_until(lambda: load.failures or len(load.answers) >= wanted, "more answers")
