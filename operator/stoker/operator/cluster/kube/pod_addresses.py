"""The addresses of pods that are polled, taken from lists and watches that show these pods anyway.

Shared by the clients of one API server. Owned by `service/program`.
"""

from __future__ import annotations

from collections import OrderedDict

from stoker.operator.cluster.interface import PodUnreachable
from stoker.operator.cluster.pod_http import http_port
from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import answers_polls

MAX_ADDRESSES = 10_000


class PodAddresses:
    """URLs by the uid of a pod; the least recently used go first."""

    def __init__(self, most: int = MAX_ADDRESSES) -> None:
        self.most = most
        self._urls: OrderedDict[str, str] = OrderedDict()

    def get(self, uid: str) -> str | None:
        """The URL of a pod, or None if it has to be read."""
        found = self._urls.get(uid)
        if found is not None:
            self._urls.move_to_end(uid)
        return found

    def put(self, uid: str, url: str) -> None:
        self._urls[uid] = url
        self._urls.move_to_end(uid)
        while len(self._urls) > self.most:
            self._urls.popitem(last=False)

    def forget(self, uid: str) -> None:
        """Forget a pod that is gone, or does not answer there."""
        self._urls.pop(uid, None)

    def note(self, pod: Object) -> None:
        """Take the address of a whole pod, if it is one that is polled and has an address."""
        uid = pod["metadata"]["uid"]
        if not answers_polls(pod) or uid in self._urls:
            return
        try:
            self.put(uid, pod_url(pod))
        except PodUnreachable:
            return


def pod_url(pod: Object) -> str:
    """Build the URL `http://IP:PORT` of the port that serves `/status`.

    Raises:
        PodUnreachable: it has no address yet, or names no port.
    """
    address = str((pod.get("status") or {}).get("podIP") or "")
    if not address:
        raise PodUnreachable(f"pod {pod['metadata']['name']} has no address yet")
    port = http_port(pod)
    if isinstance(port, str):
        ports = pod["spec"]["containers"][0]["ports"]
        port = next(int(found["containerPort"]) for found in ports if found.get("name") == port)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
