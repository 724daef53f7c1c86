"""The limits of one router on requests. Made by `Router` from its configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProxyLimits:
    """Limits on what the proxy does for one request, and holds for all."""

    max_attempts: int
    hold_s: float
    max_held_requests: int
    max_body_bytes: int
    max_body_bytes_in_flight: int
    max_resume_bytes: int
    resume_wait_s: float
    comment_interval_s: float = 0.0
    """Silence after which a stream gets a comment; 0: never."""
