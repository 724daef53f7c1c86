"""The OpenAPI document of a trainer's agent, at `/openapi.json`. Pure."""

from __future__ import annotations

from typing import Any, get_args

from stoker.pod.api_document import (
    COUNT,
    OBJECT,
    TEXT,
    Answer,
    Described,
    Schema,
    control,
    described,
    probes,
    refused,
)
from stoker.pod.metric_log import COLUMNS
from stoker.pod.metric_reader import MOST
from stoker.pod.metric_thinning import FEWEST
from stoker.trainer.agent.control import ID, MODES
from stoker.trainer.agent.history import LARGEST_STEP
from stoker.trainer.agent.history import PATH as HISTORY
from stoker.trainer.protocol.messages import SaveReason

OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}
REQUEST_ID: Schema = {"type": "string", "pattern": f"^{ID.pattern}$"}
STATUS: Schema = {
    "type": "object",
    "required": ["program", "pod_uid", "job_uid", "phase", "message", "saves", "requests", "nodes"],
    "properties": {
        "program": {"const": "trainer"},
        "pod_uid": OPTIONAL_TEXT,
        "job_uid": OPTIONAL_TEXT,
        "phase": TEXT,
        "message": TEXT,
        "step": {"type": ["integer", "null"]},
        "saves": {"type": "array", "items": OBJECT},
        "saves_omitted": {"type": "integer"},
        "requests": OBJECT,
        "nodes": {"type": "array", "items": OBJECT},
        "cause": OPTIONAL_TEXT,
    },
}
REQUEST: Schema = {"type": "object", "required": ["id"], "properties": {"id": TEXT}}
SAVE: Schema = {
    "type": "object",
    "required": ["id"],
    "additionalProperties": False,
    "properties": {"id": REQUEST_ID, "reason": {"enum": list(get_args(SaveReason))}},
}
DRAIN: Schema = {
    "type": "object",
    "required": ["id", "mode", "deadline_s"],
    "additionalProperties": False,
    "properties": {
        "id": REQUEST_ID,
        "mode": {"enum": list(MODES)},
        "deadline_s": {"type": "number", "exclusiveMinimum": 0},
    },
}
POINT: Schema = {
    "type": "object",
    "required": ["step"],
    "additionalProperties": False,
    "properties": {"step": COUNT, **{column: {"type": "number"} for column in COLUMNS}},
}
POINTS: Schema = {
    "type": "object",
    "required": ["points", "unreadable"],
    "properties": {"points": {"type": "array", "items": POINT}, "unreadable": COUNT},
}
STEP: Schema = {"type": "integer", "minimum": 0, "maximum": LARGEST_STEP}


def agent_document() -> dict[str, Any]:
    """Every route of an agent."""
    history = Described(
        "get", HISTORY, "The points of the run's metrics log, thinned with their extremes",
        {
            200: Answer("The points in the order of their steps.", POINTS),
            400: refused("A parameter is wrong."),
            404: refused("This pod writes no metrics log, or no step was logged yet."),
            503: refused("The file cannot be read."),
        },
        query={"after_step": STEP, "until_step": STEP,
               "max_points": {"type": "integer", "minimum": FEWEST, "maximum": MOST}},
    )  # fmt: skip
    save = control("post", "/checkpoint", "Save at the next step boundary; an id acts once", SAVE, REQUEST)
    drain = control("post", "/drain", "Save and end the run; at the deadline without the save", DRAIN, REQUEST)
    text = "The parent of a pod's ranks. Control routes are served where the pod has the operator's public keys."
    return described("Stoker trainer agent", text, [*probes(STATUS), history, save, drain])
