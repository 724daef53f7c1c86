"""The smaller model's deployment that answers while no engine of this one can.

The request goes to that deployment's endpoint with its model's name, so its answer says which model spoke. It goes
there once: a request that comes from another deployment's fallback is never passed on.

`Dispatch` asks its `Endpoint` last.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.pod.marked_streams import RESUME_HEADER
from stoker.router.connection import Outgoing
from stoker.router.request_fields import fields_of, with_model
from stoker.router.snapshot import EndpointEntry

FALLBACK_HEADER = b"x-stoker-fallback"
"""On a request: the deployment whose engines could not take it. On an answer: the deployment that gave it."""


def is_from_fallback(request: Outgoing) -> bool:
    """Whether another deployment passed the request on as it has no engine for it."""
    return any(name == FALLBACK_HEADER for name, _ in request.headers)


def for_fallback(request: Outgoing, target: EndpointEntry, own: str) -> Outgoing | None:
    """The request with the other model's name; None where it names no model or has been passed on already.

    Args:
        own: name of the deployment that passes it on.
    """
    if is_from_fallback(request):
        return None
    fields = fields_of(request.body)
    if fields is None or "model" not in fields:
        return None
    content = with_model(fields, target.model)
    kept = [(name, value) for name, value in request.headers if name != RESUME_HEADER]
    return replace(request, headers=[*kept, (FALLBACK_HEADER, own.encode())], body=content)
