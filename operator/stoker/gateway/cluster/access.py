"""Connections to a cluster and the identity of callers: TokenReview and impersonation, or the key of a file.

Made by the program. The only state is a cache of reviewed tokens, which may be lost at any time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from stoker.gateway.cluster.interface import NODE, ApiError, Cluster, Selection
from stoker.gateway.cluster.rest import TIMEOUT, RestCluster
from stoker.gateway.config import ApiServerConfig, EmbeddedConfig
from stoker.gateway.problem import Problem

INFORMATIVE = "authentication.kubernetes.io/"
"""Prefix of extra attributes that only inform about a token; no authorizer needs them."""
MAX_REVIEWS = 10_000
MAX_STREAMS = 4096
"""Watches, followed logs and relayed answers that are open at once at an API server."""
MAX_LOCAL_STREAMS = 500
"""The same at the supervisor; a process has some 1,024 files."""
MAX_SOCKET_BYTES = 100
"""Longest path of a Unix socket."""
REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"


@dataclass(frozen=True)
class Identity:
    """A caller."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Access(Protocol):
    """The door to a cluster."""

    async def identify(self, token: str | None) -> Identity:
        """The caller with this bearer token. Raises Problem 401."""

    def as_caller(self, caller: Identity) -> Cluster:
        """The cluster with the rights of a caller. Raises Problem 403."""

    async def check(self) -> None:
        """Raise ApiError when the cluster does not answer."""

    async def close(self) -> None: ...


class KubernetesAccess:
    """An API server, reached with the gateway's own service account."""

    def __init__(
        self,
        config: ApiServerConfig,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        transport: httpx.AsyncBaseTransport | None = None,
        timeout: httpx.Timeout = TIMEOUT,
    ) -> None:
        self.config = config
        self.monotonic = monotonic
        self.timeout = timeout
        url, trust = config.url or _own_server(os.environ), _trust(config.ca_file)
        self.client, self.streams = (
            httpx.AsyncClient(
                base_url=url, verify=trust, trust_env=False, transport=transport,
                limits=httpx.Limits(max_connections=most, max_keepalive_connections=64),
            )
            for most in (512, MAX_STREAMS)
        )  # fmt: skip
        self._reviewed: OrderedDict[str, tuple[float, Identity]] = OrderedDict()

    async def identify(self, token: str | None) -> Identity:
        if not token:
            raise _unknown("a bearer token of the cluster is needed")
        digest = hashlib.sha256(token.encode()).hexdigest()
        known = self._reviewed.get(digest)
        if known is not None and self.monotonic() - known[0] < self.config.identity_cache_s:
            return known[1]
        caller = await self._review(token)
        self._reviewed[digest] = (self.monotonic(), caller)
        while len(self._reviewed) > MAX_REVIEWS:
            self._reviewed.popitem(last=False)
        return caller

    async def _review(self, token: str) -> Identity:
        spec: dict[str, Any] = {"token": token}
        if self.config.audiences:
            spec["audiences"] = list(self.config.audiences)
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": spec}
        status = (await self._own().review(REVIEWS, body)).get("status") or {}
        user = status.get("user") or {}
        if not status.get("authenticated") or not user.get("username"):
            raise _unknown("the cluster does not know this token")
        return Identity(
            str(user["username"]), str(user.get("uid") or ""), tuple(user.get("groups") or ()), user.get("extra") or {}
        )

    def as_caller(self, caller: Identity) -> Cluster:
        headers = [("Impersonate-User", caller.name), *(("Impersonate-Group", group) for group in caller.groups)]
        for name, values in caller.extra.items():
            if name in self.config.passed_extras:
                headers += [(f"Impersonate-Extra-{_escaped(name)}", value) for value in values]
            elif not name.startswith(INFORMATIVE):
                detail = f"the caller's attribute {name!r} may limit its rights and is not in cluster.passed_extras"
                raise Problem(403, "forbidden", detail)
        return RestCluster(self.client, self.streams, [*self._authorization(), *headers], timeout=self.timeout)

    async def check(self) -> None:
        await self._own().review(
            REVIEWS, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": "-"}}
        )

    async def close(self) -> None:
        await self.client.aclose()
        await self.streams.aclose()

    def _own(self) -> RestCluster:
        return RestCluster(self.client, self.streams, self._authorization(), timeout=self.timeout)

    def _authorization(self) -> list[tuple[str, str]]:
        if self.config.token_file is None:
            return []
        try:
            token = Path(self.config.token_file).read_text(encoding="ascii").strip()
        except OSError as error:
            raise ApiError(0, "NoCredentials", f"{self.config.token_file}: {error.strerror}") from error
        return [("Authorization", f"Bearer {token}")]


class EmbeddedAccess:
    """The embedded cluster: one user, who has all rights."""

    def __init__(
        self,
        config: EmbeddedConfig,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        timeout: httpx.Timeout = TIMEOUT,
    ) -> None:
        self.config = config
        self.client, self.streams = (
            httpx.AsyncClient(
                base_url="http://supervisor", transport=transport or _supervisor(config.socket, most), trust_env=False
            )
            for most in (100, MAX_LOCAL_STREAMS)
        )
        self._cluster = RestCluster(self.client, self.streams, [], log_silence_s=None, timeout=timeout)

    async def identify(self, token: str | None) -> Identity:
        if not token or not hmac.compare_digest(token.encode(), read_key(self.config.key_file).encode()):
            raise _unknown("the key of this gateway is needed as bearer token")
        return Identity("local")

    def as_caller(self, caller: Identity) -> Cluster:  # noqa: ARG002 - there is one
        return self._cluster

    async def check(self) -> None:
        await self._cluster.list(NODE, Selection())

    async def close(self) -> None:
        await self.client.aclose()
        await self.streams.aclose()


def read_key(path: str) -> str:
    """Read the key; others must not be able to. Raises ApiError."""
    try:
        mode = Path(path).stat().st_mode
        key = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ApiError(0, "NoKey", f"{path}: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ApiError(0, "NoKey", f"{path}: mode {stat.S_IMODE(mode):04o} lets others read it, 0600 is needed")
    if len(key) < 32:
        raise ApiError(0, "NoKey", f"{path}: a key of at least 32 characters is needed")
    return key


def open_access(config: ApiServerConfig | EmbeddedConfig) -> Access:
    """Open the configured cluster. Raises ValueError where there is none to be found."""
    return KubernetesAccess(config) if isinstance(config, ApiServerConfig) else EmbeddedAccess(config)


def _supervisor(socket: str, most: int) -> httpx.AsyncHTTPTransport:
    limits = httpx.Limits(max_connections=most, max_keepalive_connections=20)
    return httpx.AsyncHTTPTransport(uds=_reachable(socket), limits=limits)


def _reachable(socket: str) -> str:
    """A path of the socket that fits an address: that of a long one leads through its open folder."""
    if len(os.fsencode(socket)) <= MAX_SOCKET_BYTES:
        return socket
    folder = os.open(Path(socket).parent, os.O_RDONLY | os.O_DIRECTORY)  # stays open as long as the process runs
    return f"/proc/self/fd/{folder}/{Path(socket).name}"


def _own_server(environment: Mapping[str, str]) -> str:
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise ValueError("cluster.url: needed outside a cluster's pod")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _trust(ca_file: str | None) -> ssl.SSLContext | bool:
    if ca_file is None or not Path(ca_file).exists():
        return True
    return ssl.create_default_context(cafile=ca_file)


def _escaped(name: str) -> str:
    """Write an attribute's name for a header: lower case, and bytes outside a header's characters in percent."""
    allowed = "abcdefghijklmnopqrstuvwxyz0123456789-._~"
    return "".join(c if c in allowed else "".join(f"%{b:02X}" for b in c.encode()) for c in name.lower())


def _unknown(detail: str) -> Problem:
    return Problem(401, "unauthenticated", detail, headers={"WWW-Authenticate": 'Bearer realm="stoker"'})
