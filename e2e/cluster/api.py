"""The requests that the start of a cluster needs, sent to its API server as an administrator."""

import ssl
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"


class Api:
    """JSON over HTTPS with a client certificate; an error status raises `httpx.HTTPStatusError`."""

    def __init__(self, url: str, keys: Path, *, user: str = "admin") -> None:
        context = ssl.create_default_context(cafile=str(keys / "ca.crt"))
        context.load_cert_chain(keys / f"{user}-client.crt", keys / f"{user}-client.key")
        self._client = httpx.Client(base_url=url, verify=context, timeout=60, trust_env=False)

    def __enter__(self) -> "Api":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get(self, path: str) -> dict[str, Any] | None:
        """Return the object at `path`; None if it does not exist."""
        answer = self._client.get(path)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return self._object(answer)

    def apply(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        """Create the object at `path`, or update it."""
        parameters = {"fieldManager": "cluster", "force": "true"}
        return self._object(self._client.patch(path, params=parameters, json=document, headers={"Content-Type": APPLY}))

    def merge(self, path: str, change: dict[str, Any]) -> dict[str, Any]:
        """Change some fields of the object at `path`."""
        return self._object(self._client.patch(path, json=change, headers={"Content-Type": MERGE}))

    def delete(self, path: str) -> None:
        """Delete the object at `path`, if it exists."""
        answer = self._client.delete(path)
        if answer.status_code != httpx.codes.NOT_FOUND:
            answer.raise_for_status()

    @staticmethod
    def _object(answer: httpx.Response) -> dict[str, Any]:
        if answer.is_error:
            raise httpx.HTTPStatusError(f"{answer.request.url}: {answer.text}", request=answer.request, response=answer)
        return dict(answer.json())
