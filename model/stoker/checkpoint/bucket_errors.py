"""Errors of the client of a bucket as errors of a file system, in one line: the request, and what the server answered.

A server's answer is XML of several lines with the code that says what is wrong (`SignatureDoesNotMatch`,
`NoSuchBucket`); the client's own classes know only its HTTP status, and not for every request. Pure.
"""

from __future__ import annotations

import errno
import re

_CODE, _MESSAGE = (re.compile(rf"<{name}>([^<]+)</{name}>") for name in ("Code", "Message"))
_DENIED = re.compile(r"status code: 40[13]\b")
_METADATA_SERVICE = "169.254.169.254"
"""Where the client looks for credentials when none are given."""
_NO_CREDENTIALS = (
    "no credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY were not given (in a manifest by the Secret of "
    "credentialsSecretRef, for a model.uri of uriSecretRef), and this machine has no identity of its own"
)
_MISSING_CODES = ("", "NoSuchKey", "404")


def as_os_error(error: Exception, place: str) -> OSError:
    """Return the error to raise: FileNotFoundError, PermissionError or OSError.

    Args:
        error: of the client; one that it has for a missing object is a FileNotFoundError.
        place: the object as people write it, `s3://BUCKET/KEY`.
    """
    text = str(error)
    code = _found(_CODE, text)
    if isinstance(error, FileNotFoundError) and code in _MISSING_CODES:
        return FileNotFoundError(errno.ENOENT, "no such object", place)
    if _METADATA_SERVICE in text:
        return PermissionError(errno.EACCES, _NO_CREDENTIALS, place)
    told = _told(text, code)
    return PermissionError(errno.EACCES, told, place) if _DENIED.search(text) else OSError(errno.EIO, told, place)


def _told(text: str, code: str) -> str:
    """The client's first line, and the server's code and message in place of its XML."""
    request = text.strip().partition("\n")[0].partition(": <")[0].rstrip(": ")
    return ": ".join(part for part in (request, code, _found(_MESSAGE, text)) if part)


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
