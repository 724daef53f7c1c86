"""A registry of OCI images in this process, in memory: manifests, blobs, uploads, tokens, connections that break.

It answers as the distribution specification 1.1 asks, with log-in by a token (`Bearer`) that a name and password give.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

USER, PASSWORD = "tester", "PasswordOnlyForTests"
_TOKENS = {"pull": "token-to-pull", "pull,push": "token-to-push"}


class RegistryServer:
    """The server, from `with` to its end."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        """By `REPOSITORY:TAG` and `REPOSITORY@DIGEST`."""
        self.fetched: list[tuple[str, int]] = []
        """(digest, offset) of each request for a blob."""
        self.cut_after: int | None = None
        """Bytes after which answers with blobs end too early."""
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.registry = self  # type: ignore[attr-defined]

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self._http.server_address[1]}"

    @property
    def login(self) -> dict[str, str]:
        """The variables of a client."""
        return {"REGISTRY_USERNAME": USER, "REGISTRY_PASSWORD": PASSWORD}

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing."""

    def _serve(self) -> None:
        self.registry: RegistryServer = self.server.registry  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
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
            realm = f'Bearer realm="http://{self.registry.place}/token",service="tests",scope="{scope}"'
            self._answer(401, b"{}", {"WWW-Authenticate": realm})
            return
        getattr(self, f"_{self.command.lower()}")(url.path.removeprefix("/v2/"), query, body)

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815

    def _token(self, query: dict[str, str]) -> None:
        expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != expected:
            self._answer(401, b"{}", {})
            return
        self._answer(200, json.dumps({"token": _TOKENS[query["scope"].rpartition(":")[2]]}).encode(), {})

    def _get(self, path: str, query: dict[str, str], body: bytes) -> None:
        if "/manifests/" in path:
            repository, _, reference = path.partition("/manifests/")
            mark = "@" if reference.startswith("sha256:") else ":"
            found = self.registry.manifests.get(f"{repository}{mark}{reference}")
            self._answer(200 if found else 404, found or b"{}", {})
            return
        digest = path.rpartition("/")[2]
        data = self.registry.blobs.get(digest)
        if data is None:
            self._answer(404, b"{}", {})
            return
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.registry.fetched.append((digest, start))
        self._answer(206 if start else 200, data[start:], {}, self.registry.cut_after)

    _head = _get

    def _post(self, path: str, query: dict[str, str], body: bytes) -> None:
        self._answer(202, b"", {"Location": f"/v2/{path.rstrip('/')}/one?state=x"})

    def _put(self, path: str, query: dict[str, str], body: bytes) -> None:
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if "/manifests/" in path:
            repository, _, tag = path.partition("/manifests/")
            missing = [one["digest"] for one in json.loads(body)["layers"] if one["digest"] not in self.registry.blobs]
            if missing:
                self._answer(400, b"blob unknown", {})
                return
            self.registry.manifests[f"{repository}:{tag}"] = self.registry.manifests[f"{repository}@{digest}"] = body
        elif query.get("digest") != digest or query.get("state") != "x":
            self._answer(400, b"digest invalid", {})
            return
        else:
            self.registry.blobs[digest] = body
        self._answer(201, b"", {})

    def _answer(self, status: int, body: bytes, headers: dict[str, Any], cut_after: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut_after is None else body[:cut_after])
        if cut_after is not None and cut_after < len(body):
            self.wfile.flush()
            self.close_connection = True
