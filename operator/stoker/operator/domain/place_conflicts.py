"""Addresses of a TrainingJob that no server can have: URLs without a host, buckets whose name no server allows.

The CRD has no room for these rules. They hold for a spec as stored, camelCase. Pure; called by `unsupported`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

Section = Mapping[str, Any]

BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of AWS are narrower; other servers, and old buckets, have wider ones."""
LOCAL_SCHEMES = ("file", "local", "memory")
"""Schemes of URLs that name no host."""


def place_conflicts(spec: Section) -> list[str]:
    """Return one line per address, with its field, its value and what is allowed."""
    return [*_of_urls(spec), *_of_bucket(spec), *_of_tracking(spec)]


def _of_urls(spec: Section) -> Iterator[str]:
    data = spec.get("data") or {}
    sources = {f"spec.data.sources {source['name']}: url": source for source in data.get("sources") or ()}
    sources["spec.data.validation.source.url"] = (data.get("validation") or {}).get("source") or {}
    for field, source in sources.items():
        url = source.get("url")
        problem = None if url is None else _problem(url)
        if problem:
            yield f"{field} {url}: {problem}; a URL is like s3://bucket/corpus or https://host/file"


def _of_bucket(spec: Section) -> Iterator[str]:
    bucket = ((spec.get("checkpoint") or {}).get("storage") or {}).get("s3") or {}
    field, name, endpoint = "spec.checkpoint.storage.s3", bucket.get("bucket"), bucket.get("endpoint")
    if name is not None and not BUCKET.fullmatch(name):
        yield f"{field}.bucket {name!r}: a name of a bucket begins with a letter or digit, and has only these and . _ -"
    problem = None if endpoint is None else _problem(endpoint)
    if problem:
        yield f"{field}.endpoint {endpoint}: {problem}; an endpoint is like https://minio.storage:9000"


def _of_tracking(spec: Section) -> Iterator[str]:
    uri = ((spec.get("logging") or {}).get("mlflow") or {}).get("trackingUri")
    if uri is None or uri.startswith(("/", ".", "file:")):
        return  # a folder: `pod_paths` checks it
    scheme, found, _ = uri.partition("://")
    problem = _problem(uri) if found and scheme in ("http", "https") else "no folder and no server"
    if problem:
        yield f"spec.logging.mlflow.trackingUri {uri or '(empty)'}: {problem}; allowed: file:///FOLDER, http:// and https://"


def _problem(url: str) -> str:
    """Why a URL can name nothing; empty where it may."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return str(error)
    if re.search(r"\s", url):
        return "it has a space"
    return "" if parts.netloc or parts.scheme in LOCAL_SCHEMES else "no host or bucket follows //"
