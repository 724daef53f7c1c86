"""Bodies of requests whose route takes none: what is asked for in one is refused, and never left out in silence."""

from __future__ import annotations

import json

from fastapi import Request

from stoker.gateway.http.requests import WITH_BODY
from stoker.gateway.problem import FieldProblem, Problem

EMPTY: tuple[object, ...] = ({}, None)
"""What some clients send where they have nothing to say."""


async def known_body(request: Request) -> None:
    """Check that a request has a body only where its route reads one. Raises Problem 422."""
    if request.method not in WITH_BODY or request.scope["route"].body_field is not None:
        return
    if errors := unread_fields(await request.body()):
        detail = "; ".join(f"{one.field}: {one.message}" for one in errors)
        raise Problem(422, "invalid", detail[:4000], errors=errors)


def unread_fields(body: bytes) -> list[FieldProblem]:
    """What is wrong with a body that no route reads: each of its fields, or all of it."""
    if not body.strip():
        return []
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        given = body[:200]
    if given in EMPTY:
        return []
    if not isinstance(given, dict):
        return [FieldProblem(field="body", message=f"this route takes none, got {str(given)[:200]!r}")]
    message = "no such field; this route takes no body"
    return [FieldProblem(field=name[:100] or "body", message=message) for name in sorted(given)[:20]]
