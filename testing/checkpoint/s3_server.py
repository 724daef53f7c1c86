"""A server of the S3 protocol in this process, in memory: buckets that a test can look into and connections it can cut.

It knows what the storage of checkpoints asks for: objects, ranges, conditional writes, copies, uploads in parts, lists.
The same tests run against a real server, which proves that it behaves like one (`test_bucket_storage`).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from testing.checkpoint.memory_server import MemoryHandler, MemoryServer

KEY, SECRET = "AKIDTEST", "wJalrOnlyForTests"
PAGE = 20
"""Keys in one answer of a list: few, so that lists of several checkpoints have pages."""

Fault = Callable[[int, str], str]
"""(number of the request, method) -> "" to answer, "cut" to close before the work, "lost" to close after it, "503",
"expired" to refuse credentials whose time is over."""
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


class S3Server(MemoryServer):
    """The server, from `with` to its end."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.objects: dict[str, bytes] = {}
        """By `bucket/key`."""
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        """Uploads in parts that are not complete."""
        self.requests = 0
        self.fault: Fault = lambda _number, _method: ""
        self.lock = threading.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a client."""
        return {"AWS_ENDPOINT_URL": self.endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


class _Handler(MemoryHandler):
    owner: S3Server

    def _serve(self) -> None:
        s3 = self.owner
        body = self._body()
        with s3.lock:
            s3.requests += 1
            fault = s3.fault(s3.requests, self.command)
        if fault == "cut":
            self.close_connection = True
            return
        if fault == "503":
            self._answer(503, b"", {})
            return
        if fault == "expired":
            self._answer(403, EXPIRED, {})
            return
        if f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>", {})
            return
        with s3.lock:
            status, answer, headers = self._handle(s3, body)
        if fault == "lost":
            self.close_connection = True
            return
        self._answer(status, answer, headers)

    def _handle(self, s3: S3Server, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        url = urlsplit(self.path)
        name, query = unquote(url.path).lstrip("/"), parse_qs(url.query, keep_blank_values=True)
        if "list-type" in query:
            return 200, _listed(s3, name.rstrip("/"), query), {}
        if self.command == "POST":
            return self._post(s3, name, query, body)
        if self.command == "PUT":
            return self._put(s3, name, query, body)
        if self.command == "DELETE":
            s3.objects.pop(name, None)
            s3.uploads.pop(query.get("uploadId", [""])[0], None)
            return 204, b"", {}
        return self._get(s3, name)

    def _post(self, s3: S3Server, name: str, query: dict[str, Any], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        bucket, _, key = name.partition("/")
        if "uploads" in query:
            upload = f"upload-{len(s3.uploads)}-{s3.requests}"
            s3.uploads[upload] = (name, {})
            text = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            return 200, _xml("InitiateMultipartUploadResult", text), {}
        if "delete" in query:
            keys = [item.text or "" for item in ElementTree.fromstring(body).iter() if item.tag.endswith("Key")]
            for deleted in keys:
                s3.objects.pop(f"{bucket}/{deleted}", None)
            text = "".join(f"<Deleted><Key>{escape(deleted)}</Key></Deleted>" for deleted in keys)
            return 200, _xml("DeleteResult", text), {}
        parts = s3.uploads.pop(query["uploadId"][0])[1]
        s3.objects[name] = b"".join(parts[number] for number in sorted(parts))
        etag = _etag(s3.objects[name])
        return 200, _xml("CompleteMultipartUploadResult", f"<Key>{escape(key)}</Key><ETag>{etag}</ETag>"), {}

    def _put(self, s3: S3Server, name: str, query: dict[str, Any], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if "uploadId" in query:
            s3.uploads[query["uploadId"][0]][1][int(query["partNumber"][0])] = body
            return 200, b"", {"ETag": _etag(body)}
        if self.headers.get("If-None-Match") == "*" and name in s3.objects:
            return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
        if source := self.headers.get("x-amz-copy-source"):
            found = s3.objects.get(unquote(source).lstrip("/"))
            if found is None:
                return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
            s3.objects[name] = found
            return 200, _xml("CopyObjectResult", f"<ETag>{_etag(found)}</ETag>"), {}
        s3.objects[name] = body
        return 200, b"", {"ETag": _etag(body)}

    def _get(self, s3: S3Server, name: str) -> tuple[int, bytes, dict[str, str]]:
        data = s3.objects.get(name)
        if data is None:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        headers = {"ETag": _etag(data), "Last-Modified": formatdate(usegmt=True), "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted is None:
            return 200, data, {**headers, "Content-Length": str(len(data))}
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
        part = data[start : end + 1]
        return 206, part, {**headers, "Content-Range": f"bytes {start}-{end}/{len(data)}"}


def _listed(s3: S3Server, bucket: str, query: dict[str, Any]) -> bytes:
    prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
    names = (name.removeprefix(f"{bucket}/") for name in s3.objects if name.startswith(f"{bucket}/"))
    keys = sorted(key for key in names if key.startswith(prefix) and key > after)
    page, more = keys[:PAGE], len(keys) > PAGE
    text = f"<Name>{bucket}</Name><IsTruncated>{str(more).lower()}</IsTruncated>"
    if more:
        text += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
    for key in page:
        data = s3.objects[f"{bucket}/{key}"]
        text += (
            f"<Contents><Key>{escape(quote(key) if 'encoding-type' in query else key)}</Key><Size>{len(data)}</Size>"
            f"<ETag>{_etag(data)}</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        )
    return _xml("ListBucketResult", text)


def _xml(root: str, text: str) -> bytes:
    return f'<?xml version="1.0"?><{root} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{text}</{root}>'.encode()


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'
