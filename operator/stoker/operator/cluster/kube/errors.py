"""Translate the API server's refusals into the interface's errors. Pure.

Called by `connection` and `kube_cluster`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stoker.operator.cluster.interface import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NamespaceTerminating,
    NotFound,
    ServerError,
    TooManyRequests,
    Unauthorized,
    Unserved,
)

MAX_MESSAGE = 2048
UNKNOWN_FIELD = "failed to create typed patch object"
"""What a server answers, with 500, to an apply that has a field which the definition lacks."""
_IDENTITY = frozenset({"metadata.uid", "metadata.resourceVersion"})
"""Fields that are only ever sent as preconditions: a complaint about them is a conflict."""


def error_of(code: int, body: Mapping[str, Any], headers: Mapping[str, str], where: str) -> ClusterError:
    """Choose the error for an answer with `code` >= 400; `body` is its `Status` object (or what could be read of it).

    `where` names the request, for people: `POST pods/a`.
    """
    message = f"{where}: {str(body.get('message') or body.get('reason') or code)[:MAX_MESSAGE]}"
    reason = str(body.get("reason") or "")
    if code == 404:
        return NotFound(message) if body.get("kind") or reason else Unserved(message)
    if code == 409:
        return AlreadyExists(message) if reason == "AlreadyExists" else _conflict(body, message)
    if code == 410:
        return Gone(message)
    if code in (400, 422):
        return Conflict(message) if _names_identity(body) else Invalid(message)
    if code == 401:
        return Unauthorized(message)
    if code == 403:
        return NamespaceTerminating(message) if _has_cause(body, "NamespaceTerminating") else Forbidden(message)
    if code == 429:
        return TooManyRequests(message, retry_after_s(body, headers))
    if code >= 500 and UNKNOWN_FIELD in message:
        return Invalid(message)
    return ServerError(message) if code >= 500 else ClusterError(message)


def status_of(content: bytes) -> Mapping[str, Any]:
    """Parse the `Status` in an answer's body; any other text (a proxy's page) becomes its message."""
    text = content.decode(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        return {"message": text.strip()[:MAX_MESSAGE]}
    return body if isinstance(body, dict) else {"message": text[:MAX_MESSAGE]}


def retry_after_s(body: Mapping[str, Any], headers: Mapping[str, str]) -> float | None:
    """Seconds to wait that the server names, in the header or else in the details; None when it names none."""
    given = headers.get("Retry-After") or (body.get("details") or {}).get("retryAfterSeconds")
    try:
        return max(0.0, float(given)) if given else None
    except ValueError:
        return None


def _conflict(body: Mapping[str, Any], message: str) -> ClusterError:
    return NamespaceTerminating(message) if _has_cause(body, "NamespaceTerminating") else Conflict(message)


def _causes(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((body.get("details") or {}).get("causes") or ())


def _has_cause(body: Mapping[str, Any], reason: str) -> bool:
    return any(cause.get("reason") == reason for cause in _causes(body))


def _names_identity(body: Mapping[str, Any]) -> bool:
    return any(cause.get("field") in _IDENTITY for cause in _causes(body))
