"""The base of servers that keep everything in the memory of this process: hub, registry, S3."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class MemoryServer:
    """A server on a free port of 127.0.0.1, from `with` to its end."""

    def __init__(self, handler: type[MemoryHandler]) -> None:
        self.second_half = threading.Event()
        """While it is not set, of a body of more than 1 MiB only the first half is sent, for half a minute."""
        self.second_half.set()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._http.owner = self  # type: ignore[attr-defined]

    @property
    def place(self) -> str:
        """Its `host:port`."""
        return f"127.0.0.1:{self._http.server_address[1]}"

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://{self.place}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()


class MemoryHandler(BaseHTTPRequestHandler):
    """A request. `owner` is the server's object; a subclass answers in `_serve`, whatever the method."""

    protocol_version = "HTTP/1.1"
    owner: Any

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Print nothing."""

    def _serve(self) -> None:
        raise NotImplementedError

    def _dispatch(self) -> None:
        self.owner = self.server.owner  # type: ignore[attr-defined]
        self._serve()

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _dispatch  # noqa: N815

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _first_byte(self) -> int:
        """The offset that a `Range` asks for; 0 without one."""
        return int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])

    def _answer(self, status: int, body: bytes, headers: dict[str, str], cut_after: int | None = None) -> None:
        """Send the answer. After `cut_after` bytes of the body the connection ends."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut_after is None and len(body) > 2**20 and not self.owner.second_half.is_set():
            half = len(body) // 2
            self.wfile.write(body[:half])
            self.wfile.flush()
            self.owner.second_half.wait(30)
            body = body[half:]
        self.wfile.write(body[:cut_after])
        if cut_after is not None and cut_after < len(body):
            self.wfile.flush()
            self.close_connection = True
