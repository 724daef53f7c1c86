"""The test cluster itself: real nodes, two clusters side by side, and nothing left behind."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e.cluster import traces
from e2e.cluster.cluster import Cluster
from e2e.cluster.errors import ClusterError
from e2e.cluster.image import BUSYBOX
from e2e.cluster.spec import NodeSpec
from e2e.cluster.waiting import wait_until

pytestmark = pytest.mark.timeout(300)

RACK = "topology.stoker.dev/rack"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    nodes = [NodeSpec(name="one", gpus=4, labels={RACK: "r1"}), NodeSpec(name="two", gpus=2, cpu=1, memory_gib=4)]
    with Cluster("itself", nodes) as running:
        yield running


def pod(name: str, command: str, *, node: str | None = None, gpus: int = 0, claim: str | None = None) -> str:
    """Return a pod that runs `command` in busybox as an ordinary user."""
    limits = {"nvidia.com/gpu": gpus} if gpus else {}
    mounts = [{"name": "data", "mountPath": "/data"}] if claim else []
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}] if claim else []
    container = {
        "name": "main",
        "image": BUSYBOX,
        "command": ["sh", "-c", command],
        "volumeMounts": mounts,
        "resources": {"limits": limits},
    }
    spec = {
        "restartPolicy": "Never",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000},
        "containers": [container],
        "volumes": volumes,
        **({"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}),
    }
    return yaml.safe_dump(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}
    )


def test_nodes_offer_what_their_specs_say(cluster: Cluster) -> None:
    nodes = {node["metadata"]["name"]: node for node in cluster.get("nodes")["items"]}

    assert nodes["one"]["status"]["allocatable"]["nvidia.com/gpu"] == "4"
    assert nodes["one"]["metadata"]["labels"][RACK] == "r1"
    assert nodes["two"]["status"]["allocatable"]["nvidia.com/gpu"] == "2"
    assert nodes["two"]["status"]["allocatable"]["cpu"] == "1"
    assert int(nodes["two"]["status"]["allocatable"]["memory"].removesuffix("Ki")) <= 4 << 20


def test_pods_on_two_nodes_share_a_volume_with_this_machine(cluster: Cluster) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "shared-data"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    documents = [
        yaml.safe_dump(claim),
        *(pod(f"w-{node}", f"echo {node} > /data/{node}", node=node, claim="shared-data") for node in ("one", "two")),
    ]
    cluster.kubectl("apply", "-f", "-", stdin="---\n".join(documents))
    for node in ("one", "two"):
        cluster.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/w-{node}", "--timeout=240s")

    folder = cluster.volume("default", "shared-data")

    assert {path.name: path.read_text() for path in folder.iterdir()} == {"one": "one\n", "two": "two\n"}


def test_a_service_answers_pods_by_name_this_machine_by_address_and_a_tunnel(cluster: Cluster) -> None:
    cluster.kubectl(
        "apply",
        "-f",
        "-",
        stdin=pod("web", "echo hello > /tmp/index.html; exec httpd -f -p 8080 -h /tmp", node="two", gpus=2),
    )
    cluster.kubectl("wait", "--for=condition=Ready", "pod/web", "--timeout=240s")
    cluster.kubectl("expose", "pod", "web", "--port=80", "--target-port=8080")
    address = cluster.get("service", "web")["spec"]["clusterIP"]

    def answer(url: str) -> bytes:
        """What is answered; empty before each kube-proxy has written its rules."""
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                return bytes(response.read())
        except OSError:
            return b""

    assert wait_until(lambda: answer(f"http://{address}/") == b"hello\n", timeout_s=240)
    with cluster.forward("default", "service/web", 80) as url:
        assert answer(url) == b"hello\n"
    asks = "until wget -qO- http://web.default.svc.cluster.local/; do sleep 0.1; done"
    cluster.kubectl("apply", "-f", "-", stdin=pod("asks", asks, node="one"))
    cluster.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/asks", "--timeout=240s")
    assert cluster.kubectl("logs", "asks") == "hello\n"


def test_more_gpus_than_a_node_has_stay_pending_until_one_joins(cluster: Cluster) -> None:
    cluster.kubectl("apply", "-f", "-", stdin=pod("large", "true", gpus=8))

    def said() -> str:
        return cluster.kubectl("get", "pod", "large", "-o", "jsonpath={.status.conditions[*].message}")

    assert wait_until(lambda: "Insufficient nvidia.com/gpu" in said(), timeout_s=240)

    cluster.add_node(NodeSpec(name="three", gpus=8))

    cluster.kubectl("wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/large", "--timeout=240s")
    cluster.remove_node("three")


def test_a_killed_node_is_noticed_and_a_new_machine_takes_its_name(cluster: Cluster) -> None:
    cluster.add_node(NodeSpec(name="four", gpus=1))
    cluster.kubectl("apply", "-f", "-", stdin=pod("victim", "sleep 1000", node="four"))
    cluster.kubectl("wait", "--for=condition=Ready", "pod/victim", "--timeout=240s")

    cluster.kill_node("four")

    cluster.kubectl("wait", "--for=condition=Ready=Unknown", "node/four", "--timeout=240s")
    assert wait_until(lambda: "deletionTimestamp" in cluster.get("pod", "victim")["metadata"], timeout_s=240)
    cluster.add_node(NodeSpec(name="four", gpus=1))
    cluster.kubectl("wait", "--for=delete", "pod/victim", "--timeout=240s")
    cluster.remove_node("four")


def test_two_clusters_live_side_by_side(cluster: Cluster) -> None:
    with Cluster("beside", [NodeSpec(name="one")]) as other:
        assert other.network.everything != cluster.network.everything
        other.kubectl("create", "namespace", "only-here")
        assert "only-here" not in cluster.kubectl("get", "namespaces")
        assert [node["metadata"]["name"] for node in other.get("nodes")["items"]] == ["one"]
        with pytest.raises(ClusterError, match="cluster beside runs already"):
            Cluster("beside").up()
    assert cluster.kubectl("get", "--raw", "/readyz") == "ok"


def test_down_leaves_nothing() -> None:
    cluster = Cluster("gone", [NodeSpec(name="one"), NodeSpec(name="two")])
    cluster.up()
    cluster.kubectl(
        "apply", "-f", "-", stdin="---\n".join(pod(f"p-{node}", "sleep 1000", node=node) for node in ("one", "two"))
    )
    for node in ("one", "two"):
        cluster.kubectl("wait", "--for=condition=Ready", f"pod/p-{node}", "--timeout=240s")
    cluster.kill_node("two")
    addresses = cluster.network
    assert traces.of_cluster("gone")
    assert traces.of_machine(addresses)

    cluster.down()

    assert traces.of_cluster("gone") == []
    assert traces.of_machine(addresses) == []
    cluster.down()  # a second time is fine
    with pytest.raises(ClusterError, match="cluster gone does not run"):
        cluster.kubectl("get", "nodes")


def test_a_process_that_is_killed_takes_its_cluster_along(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(
        "import time\nfrom e2e.cluster.cluster import Cluster\nfrom e2e.cluster.spec import NodeSpec\n"
        'Cluster("orphan", [NodeSpec(name="one")]).up()\nprint("up", flush=True)\ntime.sleep(1000)\n'
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ".", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(Path.home())},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    finally:
        process.kill()
        process.communicate()

    assert wait_until(
        lambda: not [line for line in traces.of_cluster("orphan") if line.startswith("process")], timeout_s=240
    )
    Cluster("orphan").down()
    assert traces.of_cluster("orphan") == []


def test_what_is_missing_is_said_one_line_each_before_anything_starts(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "STOKER_KUBE_BIN": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "e2e.cluster", "up", "--name", "never"], env=environment, capture_output=True, text=True
    )

    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert "no program runc: apt-get install -y runc" in lines
    assert "no program iptables: apt-get install -y iptables" in lines
    assert [line for line in lines if line.startswith("no etcd, kube-apiserver") and "make kube-binaries" in line]
    assert not (tmp_path / ".cache" / "stoker" / "kube" / "clusters").exists()
