"""A quota for groups of plain pods, as Kueue keeps one: it gates new pods, admits whole groups, and evicts."""

from __future__ import annotations

from collections import defaultdict

from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import ended
from testing.operator.simulated_cluster import SimulatedCluster

GATE = {"name": "kueue.x-k8s.io/admission"}
GROUP = "kueue.x-k8s.io/pod-group-name"
COUNT = "kueue.x-k8s.io/pod-group-total-count"


class SmallKueue:
    """A quota of pods.

    Args:
        quota: pods that may run at the same time; a test may change it.
    """

    def __init__(self, cluster: SimulatedCluster, quota: int) -> None:
        self.cluster, self.quota = cluster, quota
        self.admitted: list[str] = []
        """Names of the groups, in the order of their admission."""
        self._seen: set[str] = set()

    def groups(self) -> dict[str, list[Object]]:
        """The pods of each group that has not ended."""
        found: defaultdict[str, list[Object]] = defaultdict(list)
        for pod in self.cluster.pods("engine"):
            if GROUP in pod["metadata"]["labels"] and not ended(pod):
                found[pod["metadata"]["labels"][GROUP]].append(pod)
        return dict(found)

    def hold(self) -> None:
        """Gate the pods that are new, as Kueue's webhook does."""
        for pods in self.groups().values():
            for pod in pods:
                if pod["metadata"]["uid"] not in self._seen and pod["status"]["phase"] == "Pending":
                    pod["spec"]["schedulingGates"] = [GATE]
                    self.cluster._touch(pod)
                self._seen.add(pod["metadata"]["uid"])

    def work(self) -> None:
        """Gate new pods, then admit whole groups in the order of their names while the quota has room for them."""
        self.hold()
        for name, pods in sorted(self.groups().items()):
            whole = all(pod["metadata"]["annotations"][COUNT] == str(len(pods)) for pod in pods)
            new = name not in self.admitted and not any(pod["metadata"].get("deletionTimestamp") for pod in pods)
            if whole and new and self.used() + len(pods) <= self.quota:
                self.admitted.append(name)
                for pod in pods:
                    pod["spec"].pop("schedulingGates", None)
                    self.cluster._touch(pod)

    def evict(self, name: str) -> None:
        """Delete the pods of a group, which get the time of their grace period."""
        for pod in self.groups()[name]:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self.cluster._touch(pod)

    def used(self) -> int:
        """Pods of admitted groups that have not ended."""
        return sum(len(pods) for name, pods in self.groups().items() if name in self.admitted)
