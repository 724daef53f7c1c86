"""A registry of OCI images in this process, in memory: manifests, blobs, uploads, tokens, connections that break.

It answers as the distribution specification 1.1 asks, with log-in by a token (`Bearer`) that a name and password give.
"""

from __future__ import annotations

import base64
import hashlib
import json
from urllib.parse import parse_qs, urlsplit

from testing.checkpoint.memory_server import MemoryHandler, MemoryServer

USER, PASSWORD = "tester", "PasswordOnlyForTests"
_TOKENS = {"pull": "token-to-pull", "pull,push": "token-to-push"}


class RegistryServer(MemoryServer):
    """The server, from `with` to its end."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        """By `REPOSITORY:TAG` and `REPOSITORY@DIGEST`."""
        self.fetched: list[tuple[str, int]] = []
        """(digest, offset) of each request for a blob."""
        self.cut_after: int | None = None
        """Bytes after which answers with blobs end too early."""
        self.realm: str | None = None
        """Address that gives tokens; None for one of its own."""
        self.token_answer: bytes | None = None
        """Body of its answers with a token, in place of the right one."""
        self.cut_manifests: int | None = None
        """Bytes after which answers with manifests end too early."""

    @property
    def login(self) -> dict[str, str]:
        """The variables of a client."""
        return {"REGISTRY_USERNAME": USER, "REGISTRY_PASSWORD": PASSWORD}


class _Handler(MemoryHandler):
    owner: RegistryServer

    def _serve(self) -> None:
        body = self._body()
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path == "/token":
            self._token(query)
            return
        writes = self.command in ("POST", "PUT")
        allowed = [_TOKENS["pull,push"]] if writes else list(_TOKENS.values())
        if self.headers.get("Authorization", "").removeprefix("Bearer ") not in allowed:
            repository = url.path.removeprefix("/v2/").rpartition("/blobs")[0] or url.path.removeprefix("/v2/")
            scope = f"repository:{repository.partition('/manifests')[0]}:{'pull,push' if writes else 'pull'}"
            address = self.owner.realm or f"http://{self.owner.place}/token"
            self._answer(401, b"{}", {"WWW-Authenticate": f'Bearer realm="{address}",service="tests",scope="{scope}"'})
            return
        getattr(self, f"_{self.command.lower()}")(url.path.removeprefix("/v2/"), query, body)

    def _token(self, query: dict[str, str]) -> None:
        expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != expected:
            self._answer(401, b"{}", {})
            return
        token = json.dumps({"token": _TOKENS[query["scope"].rpartition(":")[2]]}).encode()
        self._answer(200, token if self.owner.token_answer is None else self.owner.token_answer, {})

    def _get(self, path: str, query: dict[str, str], body: bytes) -> None:
        if "/manifests/" in path:
            repository, _, reference = path.partition("/manifests/")
            mark = "@" if reference.startswith("sha256:") else ":"
            found = self.owner.manifests.get(f"{repository}{mark}{reference}")
            self._answer(200 if found else 404, found or b"{}", {}, self.owner.cut_manifests)
            return
        digest = path.rpartition("/")[2]
        data = self.owner.blobs.get(digest)
        if data is None:
            self._answer(404, b"{}", {})
            return
        start = self._first_byte()
        self.owner.fetched.append((digest, start))
        if start >= max(len(data), 1):
            self._answer(416, b"range not satisfiable", {})
            return
        self._answer(206 if start else 200, data[start:], {}, self.owner.cut_after)

    _head = _get

    def _post(self, path: str, query: dict[str, str], body: bytes) -> None:
        self._answer(202, b"", {"Location": f"/v2/{path.rstrip('/')}/one?state=x"})

    def _put(self, path: str, query: dict[str, str], body: bytes) -> None:
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if "/manifests/" in path:
            repository, _, tag = path.partition("/manifests/")
            missing = [one["digest"] for one in json.loads(body)["layers"] if one["digest"] not in self.owner.blobs]
            if missing:
                self._answer(400, b"blob unknown", {})
                return
            self.owner.manifests[f"{repository}:{tag}"] = self.owner.manifests[f"{repository}@{digest}"] = body
        elif query.get("digest") != digest or query.get("state") != "x":
            self._answer(400, b"digest invalid", {})
            return
        else:
            self.owner.blobs[digest] = body
        self._answer(201, b"", {})
