"""The control routes `POST /checkpoint` and `POST /drain`: validation of their bodies, and each id acted on once.

Called by the operator through `server`. `RunState` keeps the ids that were handled; the agent carries the calls out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, get_args

from stoker.pod.http import ControlRoute
from stoker.trainer.agent.run_state import Request, RunState
from stoker.trainer.protocol.messages import SaveCommand, SaveReason, StopMode

ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
MODES: dict[str, StopMode] = {"suspend": "suspend", "cancel": "cancel"}

Save = Callable[[SaveCommand], bool]
Stop = Callable[[StopMode, float, str], None]


class Control:
    """The control routes of a pod.

    `save` sends a command to global rank 0; `stop(mode, deadline_s, why)` starts the end of the run.
    """

    def __init__(self, state: RunState, save: Save, stop: Stop) -> None:
        self._state, self._save, self._stop = state, save, stop

    def routes(self) -> list[ControlRoute]:
        return [ControlRoute("POST", "/checkpoint", self.checkpoint), ControlRoute("POST", "/drain", self.drain)]

    async def checkpoint(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Save at the next step boundary. Body: `{"id", "reason"}`; the result is in `/status` under `requests`."""
        request_id = self._request_id(body, ("id", "reason"))
        reason = body.get("reason", "request")
        if reason not in get_args(SaveReason):
            raise ValueError(f"reason must be one of {', '.join(get_args(SaveReason))}, got {reason!r}")
        known = self._state.register_request(request_id)
        if known is None and not self._save(SaveCommand(id=request_id, reason=reason)):
            self._state.requests[request_id] = Request("Failed", detail="the run is ending")
        return self._answer(request_id)

    async def drain(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Save, then exit Interrupted or Cancelled; at the deadline without the save.

        Body: `{"id", "mode": "suspend" | "cancel", "deadline_s"}`.
        """
        request_id = self._request_id(body, ("id", "mode", "deadline_s"))
        mode, deadline_s = body.get("mode"), body.get("deadline_s")
        if not isinstance(mode, str) or mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if not isinstance(deadline_s, int | float) or isinstance(deadline_s, bool) or not 0 < deadline_s < float("inf"):
            raise ValueError(f"deadline_s must be a positive number of seconds, got {deadline_s!r}")
        if self._state.register_request(request_id) is None:
            self._stop(MODES[mode], float(deadline_s), f"Draining ({mode})")
        return self._answer(request_id)

    def _request_id(self, body: Mapping[str, Any], allowed: tuple[str, ...]) -> str:
        if self._state.pod.node_rank != 0:
            raise ValueError(
                f"node {self._state.pod.node_rank} does not accept control calls; send them to the agent of node 0"
            )
        unknown = sorted(set(body) - set(allowed))
        if unknown:
            raise ValueError(f"unknown fields {unknown}; allowed: {', '.join(allowed)}")
        request_id = body.get("id")
        if not isinstance(request_id, str) or not ID.fullmatch(request_id):
            raise ValueError(f"id must match {ID.pattern}, got {request_id!r}")
        return request_id

    def _answer(self, request_id: str) -> Mapping[str, Any]:
        return {"id": request_id, **asdict(self._state.requests[request_id])}
