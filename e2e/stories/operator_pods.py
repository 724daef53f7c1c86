"""The operator's own pods in a story about them: leader, kill, restart, upgrade."""

from __future__ import annotations

from e2e.charts.helm import NAMESPACE
from e2e.cluster.cluster import Cluster
from e2e.stories.story import Object, Story


class OperatorPods:
    """The pods of `stoker-system`, beside the story's own namespace."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.cluster: Cluster = story.cluster

    def pods(self) -> list[Object]:
        """Return the pods by name, without those that are being deleted."""
        selector = "--selector=app.kubernetes.io/component=operator"
        found = self.cluster.get("pods", f"--namespace={NAMESPACE}", selector)["items"]
        return [{**pod, "kind": "Pod"} for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def holder(self) -> str:
        """Return the holder of the Lease; empty while there is none."""
        lease = self.story.api.get(f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/stoker")
        return str((lease or {}).get("spec", {}).get("holderIdentity") or "")

    def leader(self) -> Object:
        """Return the pod of the leading replica."""
        (found,) = [pod for pod in self.pods() if self.holder().startswith(pod["metadata"]["name"])]
        return found

    def restart(self) -> None:
        """Run `kubectl rollout restart` and wait for its end."""
        self.cluster.kubectl("rollout", "restart", "deployment/stoker", f"--namespace={NAMESPACE}")
        self.wait_for_rollout()

    def wait_for_rollout(self) -> None:
        self.cluster.kubectl("rollout", "status", "deployment/stoker", f"--namespace={NAMESPACE}", "--timeout=300s")

    def image(self) -> str:
        """Return the image of every operator pod."""
        (found,) = {pod["spec"]["containers"][0]["image"] for pod in self.pods()}
        return str(found)
