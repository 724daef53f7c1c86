"""What the routes of every kind do with resources: list them, show one, or watch them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Header, Query, Request, Response
from pydantic import BaseModel

from stoker.gateway.cluster.interface import ApiError, Kind, Object, Page, Selection
from stoker.gateway.http.caller import Call
from stoker.gateway.http.stream import Shows, View, shows_all, wants_stream, watched
from stoker.gateway.http.versions import etag, matches
from stoker.gateway.problem import wrong_field

EVENTS: dict[str, Any] = {
    "description": "A page, or with `watch` a stream of events",
    "content": {"text/event-stream": {}},
}
Watch = Annotated[bool, Query(description="Stream changes as server-sent events")]
VERSION = r"^[1-9][0-9]{0,19}$"
Version = Annotated[str | None, Query(pattern=VERSION, description="Watch: begin behind this version")]
LastEventId = Annotated[
    str | None, Header(pattern=f"^$|{VERSION}", description="Watch: begin behind this event, not `resource_version`")
]


class StreamQuery(NamedTuple):
    """Whether a caller watches, and where the watch begins; None: with the objects that exist."""

    wanted: bool
    version: str | None


async def stream_query(
    request: Request, watch: Watch = False, resource_version: Version = None, last_event_id: LastEventId = None
) -> StreamQuery:
    """Read what a request says about a watch. Raises Problem 422 about a version without one."""
    wanted = wants_stream(request, watch)
    if resource_version is not None and not wanted:
        message = f"{resource_version} is where a watch begins: add watch=true, or leave it out to read what is now"
        raise wrong_field("query.resource_version", message)
    return StreamQuery(wanted, last_event_id or resource_version)


Streamed = Annotated[StreamQuery, Depends(stream_query)]


class PageQuery(NamedTuple):
    """A page of a list."""

    limit: int
    after: str


async def listed(
    request: Request,
    call: Call,
    kind: Kind,
    selection: Selection,
    query: PageQuery,
    stream: StreamQuery,
    view: View,
    list_of: Callable[..., BaseModel],
    shows: Shows = shows_all,
) -> Any:
    """Answer with a page of `list_of`, or with a stream of changes."""
    if stream.wanted:
        _check_no_page(request)
        return await watched(call, kind, selection, stream.version, view, shows)
    page = await _page(call, kind, selection, query)
    items = [view(item) for item in page.items if shows(item)]
    return list_of(items=items, next=page.after, resource_version=page.resource_version)


def _check_no_page(request: Request) -> None:
    """Refuse parameters of pages. Raises Problem 422."""
    for name in ("continue", "limit"):
        if name in request.query_params:
            raise wrong_field(f"query.{name}", "a stream has no pages: leave it out")


async def _page(call: Call, kind: Kind, selection: Selection, query: PageQuery) -> Page:
    """Read a page. Raises Problem 422 about a token that the cluster refuses; ApiError."""
    try:
        return await call.cluster.list(kind, selection, limit=query.limit, after=query.after)
    except ApiError as error:
        if error.status != 400 or not query.after:
            raise
        allowed = "give `continue` of the page before as it is, or leave it out to begin"
        raise wrong_field("query.continue", f"{query.after[:100]!r} leads to no page: {allowed}") from error


async def watched_one(call: Call, kind: Kind, found: Object, version: str | None, view: View) -> Any:
    """Answer with the changes of one object."""
    one = Selection(found["metadata"]["namespace"], name=found["metadata"]["name"])
    return await watched(call, kind, one, version, view)


def shown(found: Object, answer: Response, if_none_match: str | None, view: View) -> Any:
    """Answer with one object and its ETag; 304 where the caller has it already."""
    if if_none_match is not None and matches(if_none_match, found):
        return Response(status_code=304, headers={"ETag": etag(found)})
    answer.headers["ETag"] = etag(found)
    return view(found)
