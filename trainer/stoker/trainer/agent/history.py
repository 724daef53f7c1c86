"""The route `/metrics/history` of an agent: the points of the run's metrics log, read from its file for each request.

Only the pod whose rank leads writes the log, so the others answer 404.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from stoker.pod.metric_reader import MOST, read_history
from stoker.pod.metric_thinning import FEWEST

PATH = "/metrics/history"
LARGEST_STEP = 2**53


def history_route(log: str | None) -> Route:
    """Build the route; `log` is the file, None where none is written."""
    one_at_a_time = asyncio.Semaphore(1)

    async def history(request: Request) -> JSONResponse:
        try:
            after = whole(request.query_params, "after_step", 0, 0, LARGEST_STEP)
            until = whole(request.query_params, "until_step", LARGEST_STEP, 0, LARGEST_STEP)
            most = whole(request.query_params, "max_points", MOST, FEWEST, MOST)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        if log is None:
            return JSONResponse({"error": "logging.jsonl is not set: this run writes no metrics log"}, 404)
        try:
            async with one_at_a_time:
                found = await asyncio.to_thread(read_history, Path(log), after, until, most)
        except FileNotFoundError:
            return JSONResponse({"error": f"{log} does not exist: no step was logged, or by another pod"}, 404)
        except OSError as error:
            return JSONResponse({"error": f"{log}: {error.strerror or error}"}, 503)
        return JSONResponse(found.document())

    return Route(PATH, history)


def whole(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """A parameter. Raises ValueError."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise ValueError(f"{name}: a whole number from {least} to {most} is needed, got {text[:40]!r}")
    return int(text)
