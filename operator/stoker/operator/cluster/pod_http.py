"""HTTP calls to pods: `/status` polls and signed control calls. A cluster gives their URLs.

Called by both implementations of `Cluster`. What an answer means is decided elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from stoker.operator.cluster.interface import PodRefused, PodUnreachable
from stoker.operator.domain.clock import Clock
from stoker.operator.domain.plan import ControlCall, Object
from stoker.pod.control_key import sign
from stoker.pod.error_text import text_of

CALL_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 20
MAX_CONNECTIONS = 256
IDLE_S = 15.0


class PodHttp:
    """A client for all pods, used from one event loop. `new_token_id` never repeats."""

    def __init__(
        self, private_key: bytes, clock: Clock, new_token_id: Callable[[], str], *, poll_timeout_s: float = 5.0
    ) -> None:
        self.private_key = private_key
        self.clock = clock
        self.new_token_id = new_token_id
        self.poll_timeout_s = poll_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def poll(self, url: str, pod_uid: str) -> Mapping[str, Any]:
        """Read the pod's whole `/status`; a router names its engines only to a control token. Raises PodUnreachable."""
        where = f"{url}/status"
        headers = self._authorization(pod_uid, "GET", "/status", b"")
        status, content = await self._ask(where, "GET", where, self.poll_timeout_s, headers=headers)
        return _json(where, status, content, PodUnreachable)

    async def call(self, url: str, call: ControlCall) -> Mapping[str, Any]:
        """Send a control call with its token. Raises PodUnreachable, PodRefused."""
        body = json.dumps(dict(call.body), separators=(",", ":")).encode()
        headers = self._authorization(call.pod.uid, call.method, call.path, body)
        headers["Content-Type"] = "application/json"
        where = f"{call.method} {call.path} of pod {call.pod.namespace}/{call.pod.name}"
        status, content = await self._ask(where, call.method, f"{url}{call.path}", CALL_TIMEOUT_S, body, headers)
        return _json(where, status, content, PodRefused)

    def _authorization(self, pod_uid: str, method: str, path: str, body: bytes) -> dict[str, str]:
        token = sign(
            self.private_key,
            pod_uid=pod_uid,
            method=method,
            path=path,
            body=body,
            now=self.clock.now().timestamp(),
            token_id=self.new_token_id(),
        )
        return {"Authorization": f"Bearer {token}"}

    async def _ask(
        self,
        where: str,
        method: str,
        url: str,
        seconds: float,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Send a request; status and at most one byte more than the allowed content. Raises PodUnreachable."""
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._client().request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                content = bytearray()
                async for chunk in answer.content.iter_any():
                    content += chunk
                    if len(content) > MAX_ANSWER_BYTES:
                        break
                return answer.status, bytes(content)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise PodUnreachable(f"{where}: {text_of(error)}") from error

    def _client(self) -> aiohttp.ClientSession:
        """A session that uses no proxy between operator and pod."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=IDLE_S)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._session


def http_port(pod: Object) -> int | str:
    """Find the port that serves `/status`: the one named `http`, else the first.

    Raises:
        PodUnreachable: the pod names no port.
    """
    ports = pod["spec"]["containers"][0].get("ports") or ()
    if not ports:
        raise PodUnreachable(f"pod {pod['metadata']['name']} has no port")
    return "http" if any(port.get("name") == "http" for port in ports) else int(ports[0]["containerPort"])


def _json(where: str, status: int, content: bytes, refusal: type[PodRefused | PodUnreachable]) -> Mapping[str, Any]:
    if status >= 300:
        raise refusal(f"{where}: {status} {content[:400].decode(errors='replace')}")
    if len(content) > MAX_ANSWER_BYTES:
        raise refusal(f"{where}: an answer of more than {MAX_ANSWER_BYTES} bytes is too long")
    try:
        body = json.loads(content)
    except ValueError as error:
        raise refusal(f"{where}: the answer is not JSON") from error
    if not isinstance(body, dict):
        raise refusal(f"{where}: the answer is not a JSON object")
    return body
