"""`helm test`: the API server refuses an impossible job, and the operator takes up a possible one.

The sizes of the refused job do not multiply out. The other job is suspended: no pod is made.

check.py NAMESPACE [URL]    URL: of the operator's metrics Service
"""

import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEADLINE_S = 120.0


def job(replicas: int, tensor: int) -> dict[str, object]:
    """Return a suspended job that names nothing that exists."""
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"generateName": "helm-test-"},
        "spec": {
            "modelFrom": {"huggingFace": {"path": "/none"}},
            "parallelism": {"tensor": tensor},
            "workers": {"replicas": replicas},
            "training": {"totalSteps": 1, "globalBatchSize": 2, "microBatchSize": 1, "sequenceLength": 8},
            "data": {"sources": [{"name": "none", "path": "/none"}]},
            "checkpoint": {"storage": {"claimName": "none"}},
            "run": {"suspend": True},
        },
    }


def call(method: str, url: str, body: object = None) -> dict[str, object]:
    """Send one request to the API server."""
    request = urllib.request.Request(f"https://kubernetes.default.svc{url}", method=method)
    request.add_header("authorization", f"Bearer {(ACCOUNT / 'token').read_text()}")
    request.add_header("content-type", "application/json")
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(request, data, timeout=10, context=context) as answer:
        return dict(json.load(answer))


def refused(jobs: str) -> None:
    """Require the refusal of a job whose three workers cannot form tensor groups of two."""
    try:
        call("POST", f"{jobs}?dryRun=All", job(replicas=3, tensor=2))
    except urllib.error.HTTPError as error:
        message = json.load(error)["message"]
        print(f"refused as it should be: {message}", flush=True)
        return
    sys.exit(
        "the API server accepted a job whose sizes do not multiply out: "
        "are the definitions of stoker-crds older than this chart?"
    )


def taken_up(jobs: str) -> None:
    """Wait until the operator writes the status of a suspended job."""
    made = call("POST", jobs, job(replicas=1, tensor=1))
    url = f"{jobs}/{made['metadata']['name']}"
    try:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            seen = call("GET", url)
            status = seen.get("status") or {}
            if status.get("observedGeneration") == seen["metadata"]["generation"]:
                print(f"taken up: {status.get('phase')}: {status.get('message', '')}", flush=True)
                return
            time.sleep(0.5)
        sys.exit(f"no operator has taken up {url} within {DEADLINE_S:.0f} s")
    finally:
        call("DELETE", url)


def main() -> None:
    """Run the check; return exit status 0 when everything holds."""
    jobs = f"/apis/stoker.dev/v1alpha1/namespaces/{sys.argv[1]}/trainingjobs"
    for url in sys.argv[2:]:
        with urllib.request.urlopen(f"{url}/readyz", timeout=10) as answer:
            print(f"{url}/readyz: {answer.status}", flush=True)
    refused(jobs)
    taken_up(jobs)


if __name__ == "__main__":
    main()
