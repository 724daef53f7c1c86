"""The web console: static files under a strict content security policy. Its data come from the routes below /v1."""

from __future__ import annotations

import os
from pathlib import Path

from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

FILES = Path(__file__).resolve().parent.parent / "console"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing inline, nothing from elsewhere, and no text becomes HTML: Trusted Types refuse every such assignment."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def console_routes(files: Path = FILES) -> list[BaseRoute]:
    """Build the routes: the files below `/console/`, and `/` leads there."""
    return [
        Route("/", _to_console),
        Route("/console", _to_console),
        Mount("/console", _ConsoleFiles(directory=files, html=True), name="console"),
    ]


async def _to_console(_: object) -> Response:
    return RedirectResponse("/console/", 307)


class _ConsoleFiles(StaticFiles):
    """Files with the headers of the console. A changed file is fetched anew (ETag), whatever its age."""

    def file_response(self, full_path: str | os.PathLike[str], *args: object, **kwargs: object) -> Response:
        answer = super().file_response(full_path, *args, **kwargs)  # type: ignore[arg-type]
        answer.headers.update(HEADERS)
        return answer
