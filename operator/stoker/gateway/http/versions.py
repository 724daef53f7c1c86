"""ETags: the resource version of an object. `If-Match` guards changes, `If-None-Match` saves an unchanged answer."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header

from stoker.gateway.cluster.interface import ApiError, Cluster, Kind, Object
from stoker.gateway.problem import Problem

IfMatch = Annotated[str | None, Header(max_length=1024, description="ETag that the resource must have")]
IfNoneMatch = Annotated[str | None, Header(max_length=1024, description="ETag of an answer that the caller has")]


def etag(found: Object) -> str:
    return f'"{found["metadata"]["resourceVersion"]}"'


def matches(header: str, found: Object) -> bool:
    """Whether one of the header's ETags is the object's."""
    given = {part.strip().removeprefix("W/") for part in header.split(",")}
    return "*" in given or etag(found) in given


def check_match(header: str | None, found: Object) -> str | None:
    """The version that a change must find; None when any may be changed. Raises Problem 412."""
    if header is None:
        return None
    if not matches(header, found):
        raise _stale(f"the resource is at {etag(found)}, not {header}")
    return None if header.strip() == "*" else str(found["metadata"]["resourceVersion"])


async def patch(cluster: Cluster, kind: Kind, found: Object, body: Object, if_match: str | None) -> Object:
    """Patch one exact object, at the version of `If-Match` if that is given. Raises Problem 412."""
    version = check_match(if_match, found)
    exact = {"uid": found["metadata"]["uid"], **({"resourceVersion": version} if version else {})}
    metadata = {**body.get("metadata", {}), **exact}
    namespace, name = found["metadata"]["namespace"], found["metadata"]["name"]
    try:
        return await cluster.patch(kind, namespace, name, {**body, "metadata": metadata})
    except ApiError as error:
        raise _meant(error, version) from error


async def delete(cluster: Cluster, kind: Kind, found: Object, if_match: str | None) -> None:
    """Delete one exact object, at the version of `If-Match` if that is given. Raises Problem 412."""
    version, metadata = check_match(if_match, found), found["metadata"]
    try:
        await cluster.delete(kind, metadata["namespace"], metadata["name"], uid=metadata["uid"], version=version)
    except ApiError as error:
        raise _meant(error, version) from error


def _meant(error: ApiError, version: str | None) -> Exception:
    return _stale(str(error)) if version and error.status == 409 else error


def _stale(detail: str) -> Problem:
    return Problem(412, "stale", detail)
