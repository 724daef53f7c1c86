"""A client of the OCI distribution protocol, as far as models need it: manifests and blobs, read and written.

https://github.com/opencontainers/distribution-spec, version 1.1. Registries on this machine (`localhost`, `127.*.*.*`)
are spoken to in plain HTTP, others too where `REGISTRY_PLAIN_HTTP` is set.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing
from stoker.checkpoint.remote.listing import CHUNK_BYTES, Environment

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MAX_MANIFEST_BYTES = 4 * 2**20
DOCKER_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")
"""Names of Docker Hub: in references, in the logins of `docker login`, and of the host that serves the API."""
TRIES = 5
"""Connections for one blob that break before the rest is given up."""
_TIMEOUT = httpx.Timeout(60, connect=10)
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


class RegistryClient:
    """One repository of a registry."""

    def __init__(self, registry: str, repository: str, environment: Environment, *, writes: bool = False) -> None:
        """Make the client; nothing is sent.

        Raises:
            CheckpointError: `.dockerconfigjson` is not valid.
        """
        self.place = f"{registry}/{repository}"
        plain = is_on_this_machine(registry) or bool(environment.get("REGISTRY_PLAIN_HTTP"))
        base = f"{'http' if plain else 'https'}://{host_of(registry)}/v2/{repository}/"
        self._http = httpx.Client(base_url=base, timeout=_TIMEOUT, follow_redirects=True, verify=not plain)
        self._login = login_of(registry, environment)
        self._scope = f"repository:{repository}:{'pull,push' if writes else 'pull'}"
        self._authorization: str | None = None

    def manifest(self, reference: str) -> tuple[str, dict[str, Any]]:
        """Return digest and content of a manifest.

        Raises:
            CheckpointMissing: there is none of that tag or digest.
            CheckpointCorrupt: it is not the one with that digest, or no JSON object.
        """
        with self._send("GET", f"manifests/{reference}", headers={"Accept": MANIFEST_TYPE}) as answer:
            body = self._body_of(answer)
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if reference.startswith("sha256:") and digest != reference:
            raise CheckpointCorrupt(f"{self.place}: the manifest of {reference} has the digest {digest}")
        try:
            found = json.loads(body) if len(body) <= MAX_MANIFEST_BYTES else None
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise CheckpointCorrupt(f"{self.place}: the manifest {reference} is no JSON object")
        return digest, found

    def blob(self, digest: str, offset: int, size: int) -> Iterator[bytes]:
        """Yield the bytes of a blob from an offset on, over several connections if need be."""
        if 0 < size <= offset:
            return  # a registry answers 416 to a range behind the end
        for left in reversed(range(TRIES)):
            try:
                for chunk in self._read_blob(digest, offset):
                    offset += len(chunk)
                    yield chunk
            except httpx.TransportError as error:
                if not left:
                    raise ConnectionError(f"{self.place}: the connection broke {TRIES} times: {error}") from error
            if offset >= size:
                return

    def has_blob(self, digest: str) -> bool:
        try:
            with self._send("HEAD", f"blobs/{digest}"):
                return True
        except CheckpointMissing:
            return False

    def push_blob(self, digest: str, source: Path | bytes) -> None:
        """Upload a blob that the registry lacks; the registry checks its digest."""
        if self.has_blob(digest):
            return
        with self._send("POST", "blobs/uploads/") as answer:
            location = self._http.build_request("POST", answer.headers["location"]).url
        url = location.copy_merge_params({"digest": digest})
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        content = source if isinstance(source, bytes) else _chunks(source)
        with self._send("PUT", str(url), headers=headers, content=content):
            return

    def push_manifest(self, reference: str, body: bytes) -> None:
        """Publish a manifest under a tag or its digest."""
        headers = {"Content-Type": MANIFEST_TYPE}
        with self._send("PUT", f"manifests/{reference}", headers=headers, content=body):
            return

    def close(self) -> None:
        self._http.close()

    def _read_blob(self, digest: str, offset: int) -> Iterator[bytes]:
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={offset}-"} if offset else {})}
        with self._send("GET", f"blobs/{digest}", headers=headers) as answer:
            skip = offset if offset and answer.status_code == 200 else 0  # a registry without ranges
            for chunk in answer.iter_raw():
                yield chunk[skip:]
                skip = max(skip - len(chunk), 0)

    @contextmanager
    def _send(
        self, method: str, url: str, headers: dict[str, str] | None = None, **body: Any
    ) -> Iterator[httpx.Response]:
        """Send a request, after a log-in where the registry asks for one; the answer is a success."""
        if self._authorization is None and "content" in body:
            self._log_in(None)  # a body that is read once cannot be sent again after a challenge
        answer = self._open(method, url, headers, body)
        if answer.status_code == 401:
            challenge = answer.headers.get("www-authenticate", "")
            answer.close()
            self._log_in(challenge)
            answer = self._open(method, url, headers, body)
        try:
            self._check(answer, url)
            yield answer
        finally:
            answer.close()

    def _open(self, method: str, url: str, headers: dict[str, str] | None, body: dict[str, Any]) -> httpx.Response:
        own = {"Authorization": self._authorization} if self._authorization else {}
        request = self._http.build_request(method, url, headers={**(headers or {}), **own}, **body)
        try:
            return self._http.send(request, stream=True)
        except httpx.TransportError as error:
            if method == "GET" and url.startswith("blobs/"):
                raise
            raise ConnectionError(f"{self.place} cannot be reached: {error}") from error

    def _body_of(self, answer: httpx.Response) -> bytes:
        try:
            return answer.read()
        except httpx.TransportError as error:
            raise ConnectionError(f"{self.place}: the connection broke: {error}") from error

    def _check(self, answer: httpx.Response, url: str) -> None:
        code = answer.status_code
        if code in (401, 403):
            raise PermissionError(
                f"{self.place}: the registry refuses access ({code}); it needs a user name and password"
            )
        if code == 404:
            raise CheckpointMissing(f"{self.place}: {url.rpartition('/')[2]} does not exist")
        if code >= 400:
            raise ConnectionError(
                f"{self.place}: the registry answers {code}: {self._body_of(answer)[:200].decode(errors='replace')}"
            )

    def _log_in(self, challenge: str | None) -> None:
        """Get what the challenge asks for: a token from the realm, or the password itself."""
        basic = "Basic " + base64.b64encode(":".join(self._login).encode()).decode() if self._login else None
        if challenge is None or not challenge.lower().startswith("bearer "):
            self._authorization = basic
            return
        asked = dict(_PARAMETER.findall(challenge))
        realm = asked.pop("realm", "")
        if not realm.startswith(("https://", "http://")):
            raise CheckpointError(f"{self.place}: the registry asks for a token of {realm!r}, which is no address")
        parameters = {"service": asked.get("service", ""), "scope": asked.get("scope") or self._scope}
        get = self._http.get if realm.startswith("http://") else httpx.get  # a password goes to a verified server
        try:
            answer = get(realm, params=parameters, headers={"Authorization": basic} if basic else {})
        except httpx.TransportError as error:
            raise ConnectionError(f"{self.place}: no token from {realm}, it cannot be reached: {error}") from error
        self._authorization = f"Bearer {self._token_in(answer, realm)}"

    def _token_in(self, answer: httpx.Response, realm: str) -> str:
        if answer.status_code >= 400:
            raise PermissionError(f"{self.place}: no token from {realm}: {answer.status_code}")
        try:
            found = answer.json()
            return str(found.get("token") or found["access_token"])
        except (ValueError, KeyError, AttributeError) as error:
            raise ConnectionError(f"{self.place}: no token from {realm}: its answer has no token") from error


def is_on_this_machine(registry: str) -> bool:
    """Whether a registry is reached by the loopback interface; `localhost.example` and `127.example` are not."""
    return re.fullmatch(r"(localhost|127(\.\d{1,3}){3})(:\d+)?", registry) is not None


def host_of(registry: str) -> str:
    """Return the host of a registry's API; `docker.io` itself is a web site."""
    return DOCKER_HUB[-1] if registry in DOCKER_HUB else registry


def login_of(registry: str, environment: Environment) -> tuple[str, str] | None:
    """Find the user name and password of a registry.

    Raises:
        CheckpointError: `.dockerconfigjson` is not what `docker login` writes.
    """
    if environment.get("REGISTRY_USERNAME"):
        return environment["REGISTRY_USERNAME"], environment.get("REGISTRY_PASSWORD", "")
    text = environment.get(".dockerconfigjson")
    if not text:
        return None
    try:
        logins = json.loads(text).get("auths", {})
        host = host_of(registry)
        entry = next((logins[key] for key in (registry, *logins) if key in logins and _host(key) == host), None)
        if entry is None:
            return None
        if "auth" in entry:
            user, _, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
            return user, password
        return str(entry["username"]), str(entry["password"])
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f".dockerconfigjson has no valid entry for {registry}") from error


def _host(key: str) -> str:
    """The host of a key in `auths`, which may be an address: `https://ghcr.io/v1/`."""
    return host_of(re.sub(r"^https?://", "", key).partition("/")[0])


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk
