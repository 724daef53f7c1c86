"""Talking to pods: `/status` polls and signed control calls. Knows addresses only as URLs that a cluster gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from stoker.operator.clock import Clock
from stoker.operator.cluster.seam import PodRefused, PodUnreachable
from stoker.operator.plan import Call, Object
from stoker.pod.control_key import sign

CALL_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 20


class PodHttp:
    """One client for all pods. `new_token_id` never repeats."""

    def __init__(
        self, private_key: bytes, clock: Clock, new_token_id: Callable[[], str], *, poll_timeout_s: float = 5.0
    ) -> None:
        self.private_key = private_key
        self.clock = clock
        self.new_token_id = new_token_id
        self.poll_timeout_s = poll_timeout_s
        self._client = httpx.AsyncClient(trust_env=False)  # a proxy has no business between operator and pod

    async def close(self) -> None:
        await self._client.aclose()

    async def poll(self, url: str) -> Mapping[str, Any]:
        """The pod's `/status`. Raises PodUnreachable."""
        try:
            answer = await self._client.get(f"{url}/status", timeout=self.poll_timeout_s)
        except httpx.HTTPError as error:
            raise PodUnreachable(f"{url}/status: {error or type(error).__name__}") from error
        return _json(f"{url}/status", answer, PodUnreachable)

    async def call(self, url: str, call: Call) -> Mapping[str, Any]:
        """A control call with its token. Raises PodUnreachable, PodRefused."""
        body = json.dumps(dict(call.body), separators=(",", ":")).encode()
        token = sign(
            self.private_key,
            pod_uid=call.pod.uid,
            method=call.method,
            path=call.path,
            body=body,
            now=self.clock.now().timestamp(),
            token_id=self.new_token_id(),
        )
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        where = f"{call.method} {call.path} of pod {call.pod.namespace}/{call.pod.name}"
        try:
            answer = await self._client.request(
                call.method, f"{url}{call.path}", content=body, headers=headers, timeout=CALL_TIMEOUT_S
            )
        except httpx.HTTPError as error:
            raise PodUnreachable(f"{where}: {error or type(error).__name__}") from error
        return _json(where, answer, PodRefused)


def http_port(pod: Object) -> int | str:
    """The port that serves `/status`: the one named `http`, else the first.

    Raises:
        PodUnreachable: the pod names no port.
    """
    ports = pod["spec"]["containers"][0].get("ports") or ()
    if not ports:
        raise PodUnreachable(f"pod {pod['metadata']['name']} has no port")
    return "http" if any(port.get("name") == "http" for port in ports) else int(ports[0]["containerPort"])


def _json(where: str, answer: httpx.Response, refusal: type[PodRefused | PodUnreachable]) -> Mapping[str, Any]:
    if answer.status_code >= 300:
        raise refusal(f"{where}: {answer.status_code} {answer.text[:400]}")
    if len(answer.content) > MAX_ANSWER_BYTES:
        raise refusal(f"{where}: an answer of {len(answer.content)} bytes is too long")
    try:
        body = answer.json()
    except ValueError as error:
        raise refusal(f"{where}: the answer is not JSON") from error
    if not isinstance(body, dict):
        raise refusal(f"{where}: the answer is not a JSON object")
    return body
