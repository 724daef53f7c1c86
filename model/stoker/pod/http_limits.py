"""Limits of an HTTP server: the `listen.limits` section of every program's configuration.

Values only: `listen` reads them from the configuration, `serve` and `http_protocol` enforce them.
"""

from __future__ import annotations

from pydantic import Field

from stoker.pod.config_file import Config


class HttpLimits(Config):
    """Bounds on what one client, and all clients together, can make a server hold. docs/serving.md lists them."""

    max_connections: int = Field(default=4096, ge=1)
    """Open connections. Beyond it a few more are accepted for probes; every other request gets 503.
    Half of the process's open files is the most, because a router needs a second one for each request."""
    max_url_bytes: int = Field(default=8192, ge=64)
    """Longest request target; beyond it 414."""
    max_head_bytes: int = Field(default=32 * 1024, ge=256)
    """Longest request line with all headers; beyond it 431."""
    max_headers: int = Field(default=100, ge=4)
    """Most headers of one request; beyond it 431."""
    head_timeout_s: float = Field(default=20.0, gt=0)
    """From the first byte of a request, or from connecting, to the end of its headers; beyond it 408."""
    body_timeout_s: float = Field(default=30.0, gt=0)
    """Time for a body, on top of what `min_body_bytes_per_s` gives it; beyond it 408."""
    min_body_bytes_per_s: int = Field(default=8192, ge=1)
    """Slowest upload of a long body."""
    send_timeout_s: float = Field(default=120.0, gt=0)
    """How long a client may read nothing of an answer before its connection is cut."""
    keep_alive_s: int = Field(default=75, ge=1)
    """How long a connection without a request stays open.
    Longer than the router keeps one, so that the router closes it first."""
    comment_interval_s: float = Field(default=15.0, ge=0)
    """A stream of events that was silent for so long gets a comment, and begins for it if it has not; 0: never."""
    max_body_bytes_in_flight: int = Field(default=128 * 2**20, ge=1)
    """Bytes of request bodies held at one time by all requests together; beyond it 503."""
