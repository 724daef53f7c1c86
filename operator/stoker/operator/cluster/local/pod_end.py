"""The end of a pod as its status reports it: the terminated state of the container and its termination message.

Called by `pod_life` once the process has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.operator.cluster.local.process import ProcessExit

MAX_MESSAGE_BYTES = 4096
MAX_LOG_TAIL_BYTES = 2048


def terminated_state(
    code: int, reason: str, *, message: str = "", now: str, started_at: str = "", container_id: str = ""
) -> dict[str, Any]:
    """Build `state.terminated` of a container that ended with an exit code."""
    found = {
        "exitCode": code,
        "reason": reason,
        "startedAt": started_at or now,
        "finishedAt": now,
        "containerID": container_id,
    }
    return found | ({"message": message} if message else {})


def termination_message(container: Mapping[str, Any], ended: ProcessExit, termination_log: Path, log: Path) -> str:
    """Read the container's termination message; the end of its log where the policy allows that."""
    try:
        message = termination_log.read_bytes()[:MAX_MESSAGE_BYTES].decode(errors="replace")
    except OSError:
        message = ""
    from_log = container.get("terminationMessagePolicy") == "FallbackToLogsOnError" and ended.code != 0
    return tail(log, MAX_LOG_TAIL_BYTES) if from_log and not message else message


def tail(file: Path, max_bytes: int) -> str:
    """Read the end of a text file; empty when there is none."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - max_bytes))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
