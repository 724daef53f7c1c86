"""Access to a bucket: endpoint, region and credentials.

`STOKER_BUCKETS` (set by the operator) is a JSON object from `BUCKET` or `BUCKET/PREFIX` to `{endpoint, region,
credentials}`; of several that fit, the longest wins. `credentials` is a folder with the files `AWS_ACCESS_KEY_ID`,
`AWS_SECRET_ACCESS_KEY` and, if need be, `AWS_SESSION_TOKEN`: a mounted Secret, which is read anew every few minutes, so
that credentials can be replaced while a run goes on. What is not named there comes from the usual variables
(`AWS_ACCESS_KEY_ID`, ..., `AWS_REGION`, `AWS_ENDPOINT_URL`).

Called by `place`. Holds no secret: credentials are read when a client is opened.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from stoker.checkpoint.errors import StorageUnusable

VARIABLE = "STOKER_BUCKETS"
DEFAULT_REGION = "us-east-1"
REREAD = timedelta(minutes=5)
"""Age of credentials at which their files are read again."""
_REQUIRED = {"access_key_id": "AWS_ACCESS_KEY_ID", "secret_access_key": "AWS_SECRET_ACCESS_KEY"}
_TOKEN = "AWS_SESSION_TOKEN"
_MEMBERS = {"endpoint", "region", "credentials"}


@dataclass(frozen=True)
class BucketAccess:
    """Where a bucket is and who may use it. None: left to the usual variables."""

    endpoint: str | None = None
    region: str = DEFAULT_REGION
    credentials: Path | None = None
    """Folder with a file for each credential."""
    given: tuple[tuple[str, str], ...] = ()
    """Credentials of the environment, as the client names them."""

    def read_credentials(self) -> dict[str, Any]:
        """Return the credentials in the folder, as the client wants them.

        Raises:
            PermissionError: a file is missing or cannot be read.
        """
        assert self.credentials is not None
        found: dict[str, Any] = {name: _text(self.credentials, file) for name, file in _REQUIRED.items()}
        token = self.credentials / _TOKEN
        if token.is_file():
            found["token"] = token.read_text().strip()
        return {**found, "expires_at": datetime.now(UTC) + REREAD}


def access_of(place: str, environment: Mapping[str, str]) -> BucketAccess:
    """Return the access to a place, `BUCKET/PREFIX/...`.

    Raises:
        StorageUnusable: `STOKER_BUCKETS` is not what this module describes.
    """
    section = _section(place, environment.get(VARIABLE))
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    folder = section.get("credentials")
    names = {**_REQUIRED, "session_token": _TOKEN}
    given = tuple((name, environment[variable]) for name, variable in names.items() if environment.get(variable))
    return BucketAccess(
        endpoint=section.get("endpoint") or endpoint or None,
        region=section.get("region") or region or DEFAULT_REGION,
        credentials=None if folder is None else Path(folder),
        given=() if folder is not None else given,
    )


def _section(place: str, text: str | None) -> Mapping[str, str]:
    """The entry with the longest name that the place starts with."""
    fitting = {name: section for name, section in _parsed(text).items() if f"{place}/".startswith(f"{name}/")}
    return fitting[max(fitting, key=len)] if fitting else {}


def _parsed(text: str | None) -> dict[str, Mapping[str, str]]:
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise StorageUnusable(f"{VARIABLE} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise StorageUnusable(f"{VARIABLE} must be an object of buckets")
    for name, section in found.items():
        wrong = not isinstance(section, dict) or section.keys() - _MEMBERS
        if wrong or not all(isinstance(value, str) for value in section.values()):
            raise StorageUnusable(f"{VARIABLE}.{name} must be an object of texts: {', '.join(sorted(_MEMBERS))}")
    return found


def _text(folder: Path, file: str) -> str:
    try:
        return (folder / file).read_text().strip()
    except OSError as error:
        wanted = " and ".join(_REQUIRED.values())
        text = f"{error.strerror}: the Secret with the credentials of the bucket needs the keys {wanted}"
        raise PermissionError(errno.EACCES, text, str(folder / file)) from error
