"""Paths of a TrainingJob that its pods cannot have: each is named with its field, its value and what is allowed."""

from typing import Any

import pytest

from stoker.operator.domain.pod_paths import SCRATCH, misplaced_paths
from stoker.operator.reconcile.intent import accept

WORKERS: dict[str, Any] = {
    "volumes": [
        {"name": "logs", "persistentVolumeClaim": {"claimName": "logs"}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": "corpus", "readOnly": True}},
        {"name": "fast", "emptyDir": {}},
        {"name": "texts", "configMap": {"name": "texts"}},
    ],
    "volumeMounts": [
        {"name": "logs", "mountPath": "/logs/"},
        {"name": "logs", "mountPath": "/logs/old", "readOnly": True},
        {"name": "shared", "mountPath": "/data"},
        {"name": "fast", "mountPath": "/fast"},
        {"name": "texts", "mountPath": "/texts"},
    ],
}
WRITABLE = "can be written: /logs, /fast, /tmp, /var/stoker/work"


def beside(
    *mounts: dict[str, Any], name: str = "main", volumes: tuple[dict[str, Any], ...] = (), **more: Any
) -> dict[str, Any]:
    """Workers with a `podTemplate` that adds mounts to one container."""
    containers = [{"name": name, "volumeMounts": list(mounts), **more}]
    return {**WORKERS, "podTemplate": {"spec": {"containers": containers, "volumes": list(volumes)}}}


ADDED = {"name": "nfs", "mountPath": "/elsewhere"}
NFS = {"name": "nfs", "nfs": {"server": "s", "path": "/p"}}
CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"data": {"sources": [{"name": "a", "path": "/in/the/image/*.txt"}, {"name": "b", "url": "s3://b/c"}]}}, []),
    ({"data": {"sources": [{"name": "a", "path": "web/*.txt"}]}}, ["spec.data.sources a: path web/*.txt is relative; a path inside the pod starts with /"]),
    ({"data": {"validation": {"source": {"name": "v", "path": "v.txt"}}, "tokenizer": {"kind": "path", "path": "./t"}}}, [
        "spec.data.validation.source.path v.txt is relative; a path inside the pod starts with /",
        "spec.data.tokenizer.path ./t is relative; a path inside the pod starts with /",
    ]),
    ({"modelFrom": {"huggingFace": {"path": "models/a"}}}, ["spec.modelFrom.huggingFace.path models/a is relative; a path inside the pod starts with /"]),
    ({"modelFrom": {"gguf": {"path": "a.gguf"}}}, ["spec.modelFrom.gguf.path a.gguf is relative; a path inside the pod starts with /"]),
    ({"logging": {"jsonl": "/logs/a.jsonl", "tensorboard": "/fast/runs", "mlflow": {"trackingUri": "https://mlflow"}}, "memory": {"nvmeOffload": {"path": "/fast"}}, "data": {"cacheDir": f"{SCRATCH[0]}/x"}}, []),
    ({"logging": {"jsonl": "logs/a.jsonl"}}, ["spec.logging.jsonl logs/a.jsonl is relative; a path inside the pod starts with /"]),
    ({"logging": {"jsonl": "/logging/a.jsonl"}}, [f"spec.logging.jsonl /logging/a.jsonl is below no volumeMount, and the pod's root is read-only; {WRITABLE}"]),
    ({"logging": {"tensorboard": "/logs/old/runs"}}, [f"spec.logging.tensorboard /logs/old/runs is below /logs/old, which is read-only; {WRITABLE}"]),
    ({"logging": {"mlflow": {"trackingUri": "file:///mlruns"}}}, [f"spec.logging.mlflow.trackingUri /mlruns is below no volumeMount, and the pod's root is read-only; {WRITABLE}"]),
    ({"data": {"cacheDir": "/data/cache"}, "memory": {"nvmeOffload": {"path": "/texts"}}}, [
        f"spec.data.cacheDir /data/cache is below /data, which is read-only; {WRITABLE}",
        f"spec.memory.nvmeOffload.path /texts is below /texts, which is read-only; {WRITABLE}",
    ]),
    ({"checkpoint": {"storage": {"claimName": "c"}}, "logging": {"jsonl": "/var/stoker/checkpoints/a.jsonl"}}, []),
    ({"workers": beside(ADDED, volumes=(NFS,)), "logging": {"jsonl": "/elsewhere/a.jsonl", "tensorboard": "b"}}, ["spec.logging.tensorboard b is relative; a path inside the pod starts with /"]),
    ({"workers": beside(ADDED, name="proxy", volumes=(NFS,)), "logging": {"jsonl": "/elsewhere/a.jsonl"}}, [f"spec.logging.jsonl /elsewhere/a.jsonl is below no volumeMount, and the pod's root is read-only; {WRITABLE}"]),
    ({"workers": beside({**ADDED, "readOnly": True}, volumes=(NFS,)), "logging": {"jsonl": "/elsewhere/a.jsonl"}}, [f"spec.logging.jsonl /elsewhere/a.jsonl is below /elsewhere, which is read-only; {WRITABLE}"]),
    ({"workers": beside(volumes=({"name": "fast", "persistentVolumeClaim": {"claimName": "c", "readOnly": True}},)), "memory": {"nvmeOffload": {"path": "/fast"}}}, ["spec.memory.nvmeOffload.path /fast is below /fast, which is read-only; can be written: /logs, /tmp, /var/stoker/work"]),
    ({"workers": beside({"mountPath": "/data", "name": "logs"}), "data": {"cacheDir": "/data/cache"}}, []),
    ({"workers": beside(securityContext={"readOnlyRootFilesystem": False}), "logging": {"jsonl": "/elsewhere/a.jsonl"}}, []),
    ({"workers": {**WORKERS, "podTemplate": {"spec": {"containers": "none"}}}, "logging": {"jsonl": "/logs/a.jsonl"}}, []),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "lines"), CASES, ids=map(str, range(len(CASES))))
def test_misplaced_paths_are_named(spec: dict[str, Any], lines: list[str]) -> None:
    assert misplaced_paths({"workers": WORKERS, **spec}) == lines


MOUNTED: dict[str, Any] = {"name": "b", "volumeMounts": [{"name": "m", "mountPath": "/tmp/models"}]}
PATCHED: dict[str, Any] = {"name": "c", "podTemplate": {"spec": {"containers": [{"name": "main", "volumeMounts": [{"name": "m", "mountPath": "/tmp"}]}]}}}  # fmt: skip
EMPTY = "is an empty folder of each pod (pool a); allowed: a path in a volume of volumeMounts, or pvc://CLAIM/PATH"
MODELS: list[tuple[str, list[dict[str, Any]], list[str]]] = [
    ("file:///in/the/image", [], []),
    ("file:///models/a..b/...", [], []),
    ("file:///tmpfs/model", [], []),
    ("file:///tmp/model", [], [f"spec.model.uri file:///tmp/model: /tmp {EMPTY}"]),
    ("file:///tmp", [], [f"spec.model.uri file:///tmp: /tmp {EMPTY}"]),
    ("file:////tmp//m/", [], [f"spec.model.uri file:////tmp//m/: /tmp {EMPTY}"]),
    ("file:///var/stoker/work/m", [MOUNTED], [f"spec.model.uri file:///var/stoker/work/m: /var/stoker/work {EMPTY}", f"spec.model.uri file:///var/stoker/work/m: /var/stoker/work {EMPTY.replace('pool a', 'pool b')}"]),
    ("file:///tmp/models/a", [MOUNTED, PATCHED], [f"spec.model.uri file:///tmp/models/a: /tmp {EMPTY}"]),
    ("file:///models/../tmp/a", [], ["spec.model.uri file:///models/../tmp/a leaves its volume by ..; allowed: a path without .."]),
    ("pvc://models/../other", [], ["spec.model.uri pvc://models/../other leaves its volume by ..; allowed: a path without .."]),
    ("pvc://models/tmp/a", [], []),
    ("hf://a/..", [], []),
    ("", [], []),
]  # fmt: skip


@pytest.mark.parametrize(("uri", "pools", "lines"), MODELS, ids=[case[0] for case in MODELS])
def test_a_model_that_no_pod_can_find_is_named(uri: str, pools: list[dict[str, Any]], lines: list[str]) -> None:
    spec = {"model": {"uri": uri} if uri else {"checkpointRef": {"name": "c"}}, "pools": [{"name": "a"}, *pools]}
    assert list(accept("InferenceDeployment", spec, None).refused) == lines
    assert accept("InferenceDeployment", spec, spec).refused == (), "what runs goes on"


GOAL = {"name": "a", "ttftMs": 1500}
LATE: list[tuple[list[dict[str, Any]], list[str]]] = [
    ([{**GOAL, "lateClass": "b"}, {"name": "b"}], []),
    ([{**GOAL, "lateClass": "b"}, {"name": "b", "ttftMs": 9000, "lateClass": "c"}, {"name": "c"}], []),
    ([{**GOAL, "lateClass": "c"}, {"name": "b"}], ["spec.router.classes[0].lateClass c is no later class; allowed: b"]),
    ([{**GOAL, "lateClass": "a"}], ["spec.router.classes[0].lateClass a is no later class; allowed: none, because no class comes later"]),
    ([{"name": "a"}, {**GOAL, "name": "b", "lateClass": "a"}, {"name": "c"}], ["spec.router.classes[1].lateClass a is no later class; allowed: c"]),
    ([{"name": "a", "lateClass": "b"}, {"name": "b"}], ["spec.router.classes[0].lateClass b has no effect without ttftMs: no request of class a is late"]),
]  # fmt: skip


@pytest.mark.parametrize(("classes", "lines"), LATE, ids=map(str, range(len(LATE))))
def test_a_class_for_late_requests_that_is_no_later_one_is_named(
    classes: list[dict[str, Any]], lines: list[str]
) -> None:
    spec = {"model": {"checkpointRef": {"name": "c"}}, "pools": [{"name": "a"}], "router": {"classes": classes}}
    assert list(accept("InferenceDeployment", spec, None).refused) == lines
    assert accept("InferenceDeployment", spec, spec).refused == (), "what runs goes on"


@pytest.mark.parametrize(
    ("autoscaling", "held", "refused"),
    [
        ({"min": 0, "max": 2, "mode": "load"}, 0, True),
        ({"min": 0, "max": 2, "ttftMs": 500}, 0, True),
        ({"min": 0, "max": 2, "mode": "load"}, 1, False),
        ({"min": 0, "max": 2, "mode": "external"}, 0, False),
        ({"max": 2, "mode": "load"}, 0, False),
        (None, 0, False),
    ],
)
def test_a_pool_that_no_request_could_wake_is_named(
    autoscaling: dict[str, Any] | None, held: int, refused: bool
) -> None:
    pool = {"name": "a", **({"autoscaling": autoscaling} if autoscaling else {})}
    router = {"holdSeconds": 60, "maxHeldRequests": held}
    spec = {"model": {"checkpointRef": {"name": "c"}}, "pools": [pool], "router": router}
    line = "spec.router.maxHeldRequests 0 holds no request that wakes pool a; allowed: 1 or more, or "
    line += "autoscaling.min above 0"
    assert accept("InferenceDeployment", spec, None).refused == ((line,) if refused else ())
    assert accept("InferenceDeployment", spec, spec).refused == (), "what runs goes on"


def test_a_job_with_such_a_path_is_refused_and_one_that_runs_stays_accepted() -> None:
    wrong = {"logging": {"jsonl": "a.jsonl"}}
    assert accept("TrainingJob", wrong, None).refused == tuple(misplaced_paths(wrong))
    assert not accept("TrainingJob", wrong, wrong).refused
