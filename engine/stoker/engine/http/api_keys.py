"""API keys of an engine's server: the file that lists them, and the check of a request."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

from stoker.engine.http.errors import ApiError
from stoker.pod.asgi import Scope, header

API_KEY_HEADER = b"x-api-key"
"""Carries the key through proxies that keep `Authorization` to themselves, as that of an API server does."""


def load_api_keys(path: str | None) -> tuple[str, ...]:
    """Read the API keys of a file, one per line; none without a file.

    Raises:
        ValueError: the file is not text, or holds no key; no request could ever be authorised.
        OSError: it cannot be read.
    """
    if path is None:
        return ()
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: API keys are needed, one per line in UTF-8 (byte {error.start} is not)") from error
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise ValueError(f"{path}: at least one API key is needed")
    return keys


def check_api_key(keys: Sequence[bytes], scope: Scope) -> None:
    """Check the key of a request. Keys are compared as bytes, so that they may be any UTF-8.

    Raises:
        ApiError: 401, the key is missing or wrong.
    """
    scheme, _, given = header(scope, b"authorization").partition(b" ")
    found = given if scheme.lower() == b"bearer" else header(scope, API_KEY_HEADER)
    matches = [hmac.compare_digest(found, key) for key in keys]
    if not any(matches):
        message = "The API key is missing or wrong; send it as `Authorization: Bearer KEY`."
        raise ApiError(401, message, code="invalid_api_key")
