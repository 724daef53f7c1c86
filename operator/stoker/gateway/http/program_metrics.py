"""The metrics of a program in the cluster, through the API server's proxy and with the caller's rights."""

from __future__ import annotations

import asyncio
import json

from stoker.gateway.cluster.interface import ApiError, Cluster, Target
from stoker.gateway.cluster.whole_answer import start_of

MAX_METRICS_BYTES = 4 << 20


async def metrics_of(cluster: Cluster, target: Target, within_s: float) -> str:
    """Read `/metrics` of a program.

    Raises:
        ApiError: the caller may not, or the program does not answer in time.
    """
    try:
        async with asyncio.timeout(within_s):
            answer = await cluster.relay(target, "GET", "/metrics")
            text = (await start_of(answer, MAX_METRICS_BYTES)).decode(errors="replace")
    except TimeoutError as error:
        raise ApiError(0, "Timeout", f"{target.name}: no metrics within {within_s:g} s") from error
    if answer.status != 200:
        raise ApiError(answer.status, "", f"{target.name}: {refusal_message(text)}")
    return text


def refusal_message(text: str) -> str:
    """The message in the body of a refusal: of a `Status`, of OpenAI's errors, or the text itself."""
    try:
        found = json.loads(text)
    except ValueError:
        return text[:300] or "no message"
    inner = found.get("error") if isinstance(found, dict) else None
    holder = inner if isinstance(inner, dict) else found if isinstance(found, dict) else {}
    return str(holder.get("message") or inner or text)[:300]
