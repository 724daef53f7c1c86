"""The OpenAPI document of a router's own routes, at `/router/openapi.json`. Pure.

The paths of the engines, which the router passes on, have the engines' document: `/openapi.json`.
"""

from __future__ import annotations

from typing import Any

from stoker.pod.api_document import COUNT, OBJECT, TEXT, Answer, Described, Schema, control, described, probes
from stoker.router.snapshot import BackendSnapshot

DOCUMENT_PATH = "/router/openapi.json"
STATUS: Schema = {
    "type": "object",
    "required": ["program", "pod_uid", "phase", "snapshot_version", "ready_backends", "running", "held"],
    "properties": {
        "program": {"const": "router"},
        "pod_uid": TEXT,
        "phase": {"enum": ["Serving", "Draining"]},
        "snapshot_version": {"type": "integer", "minimum": -1},
        "ready_backends": COUNT,
        "running": COUNT,
        "held": COUNT,
        "queued": {"type": "object", "additionalProperties": COUNT},
        "goals": {"type": "object", "additionalProperties": COUNT},
        "models": {"type": "array", "items": OBJECT},
        "backends": {"type": "array", "items": OBJECT},
    },
}
HEALTH: Schema = {
    "type": "object",
    "required": ["status", "ready_backends"],
    "properties": {"status": {"enum": ["healthy", "degraded", "unhealthy"]}, "ready_backends": COUNT},
}
ACCEPTED: Schema = {
    "type": "object",
    "required": ["accepted", "version"],
    "properties": {"accepted": {"type": "boolean"}, "version": {"type": "integer", "minimum": -1}},
}


def router_document() -> dict[str, Any]:
    """Every route that the router answers itself."""
    answers = {200: Answer("A request can be answered now.", HEALTH), 503: Answer("None can.", HEALTH)}
    health = Described("get", "/health", "Whether a request can be answered now", answers)
    snapshot = _inlined(BackendSnapshot.model_json_schema())
    put = control("put", "/backends", "Take a newer list of engines", snapshot, ACCEPTED)
    text = "What the router answers itself. The engines' routes, which it passes on, are in /openapi.json."
    return described("Stoker router", text, [*probes(STATUS), health, put])


def _inlined(found: Any, definitions: dict[str, Any] | None = None) -> Any:
    """The schema of a snapshot without references, which would lead out of its place in the document."""
    known = found.get("$defs", {}) if definitions is None else definitions
    if isinstance(found, list):
        return [_inlined(one, known) for one in found]
    if not isinstance(found, dict):
        return found
    if "$ref" in found:
        return _inlined(known[found["$ref"].rpartition("/")[2]], known)
    return {name: _inlined(one, known) for name, one in found.items() if name != "$defs"}
