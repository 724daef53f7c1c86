"""The versioned list of backends that the operator sends to its routers.

`{"version": 7, "backends": [{url, pod_uid, role, revision, pool, draining, host, zone}]}`, with a canary also
`"shares": [{revision, percent}], "window": "r0123456789.1"`, with models of other deployments also
`"own_models": ["chat"], "models": [{name, deployment, endpoint: {url, deployment, model} | problem}]`

Parsed from the mounted file at the start and from `PUT /backends` later. A snapshot never changes; a newer version
replaces it (`Backends.apply`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from stoker.pod.config_file import Config, load, parse

Role = Literal["colocated", "prefill", "decode"]


def plain_http(url: str) -> str:
    """Return `http://HOST:PORT` without a slash at its end.

    Raises:
        ValueError: it is something else.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query or parts.username:
        raise ValueError("http://HOST:PORT is needed")
    return url.rstrip("/")


class BackendEntry(Config):
    """One engine replica."""

    url: str
    """`http://HOST:PORT`, without a path."""
    pod_uid: str = Field(min_length=1)
    """The pod that must answer there; an address that another pod took over is not used."""
    role: Role = "colocated"
    """What it is for now, by default what its pool is for. Every engine can do the other parts too: a role is a
    preference, which a newer snapshot may flip."""
    host: str = ""
    """The node of its pod."""
    zone: str = ""
    """The zone of that node."""
    revision: str = ""
    pool: str = ""
    draining: bool = False
    """Whether it finishes its requests and gets no new one."""

    @field_validator("url")
    @classmethod
    def _plain_http(cls, url: str) -> str:
        return plain_http(url)

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80

    @property
    def key(self) -> tuple[str, str]:
        """The identity of a backend across snapshots."""
        return self.url, self.pod_uid


class EndpointEntry(Config):
    """The endpoint of another deployment, and the name by which it serves its model."""

    url: str
    """`http://HOST:PORT`, without a path."""
    deployment: str = Field(min_length=1)
    model: str = Field(min_length=1)

    @field_validator("url")
    @classmethod
    def _plain_http(cls, url: str) -> str:
        return plain_http(url)


class FallbackEntry(EndpointEntry):
    """Endpoint of the deployment that answers while no backend can."""


class OtherModel(Config):
    """A model of another deployment that this endpoint serves too."""

    name: str = Field(min_length=1, max_length=128)
    """The name in requests and in `/v1/models` here."""
    deployment: str = Field(min_length=1)
    endpoint: EndpointEntry | None = None
    problem: str = ""
    """Why there is no endpoint."""

    @model_validator(mode="after")
    def _known(self) -> OtherModel:
        if (self.endpoint is None) != bool(self.problem):
            raise ValueError(f"model {self.name}: either endpoint or problem is needed")
        return self


class RevisionShare(Config):
    """Percent of the new requests that a revision gets."""

    revision: str = Field(min_length=1)
    percent: int = Field(ge=0, le=100)


class BackendSnapshot(Config):
    """All backends at one version; only a higher version replaces it."""

    version: int = Field(ge=0)
    backends: tuple[BackendEntry, ...] = Field(max_length=4096)
    shares: tuple[RevisionShare, ...] = Field(default=(), max_length=4)
    """Empty: backends of every revision get requests. A revision that is not listed gets none."""
    fallback: FallbackEntry | None = None
    own_models: tuple[str, ...] = Field(default=(), max_length=8)
    """Names of the model that the backends serve; needed beside `models`."""
    models: tuple[OtherModel, ...] = Field(default=(), max_length=32)
    """Models of other deployments; empty: every request is for the backends."""
    window: str = Field(default="", max_length=128)
    """Name of the time over which revisions are compared; a new one begins their counts anew."""

    @model_validator(mode="after")
    def _unique(self) -> BackendSnapshot:
        urls = [entry.url for entry in self.backends]
        if twice := sorted({url for url in urls if urls.count(url) > 1}):
            raise ValueError(f"backends: listed twice: {', '.join(twice)}")
        served = [*self.own_models, *(other.name for other in self.models)]
        if twice := sorted({name for name in served if served.count(name) > 1}):
            raise ValueError(f"models: listed twice: {', '.join(twice)}")
        if self.models and not self.own_models:
            raise ValueError("own_models: needed beside models")
        names = [share.revision for share in self.shares]
        if len(set(names)) < len(names):
            raise ValueError(f"shares: listed twice: {', '.join(sorted({n for n in names if names.count(n) > 1}))}")
        if names and (total := sum(share.percent for share in self.shares)) != 100:
            raise ValueError(f"shares: the percents must add up to 100, got {total}")
        return self


def parse_snapshot(mapping: Mapping[str, Any]) -> BackendSnapshot:
    """Parse the body of `PUT /backends`.

    Raises:
        ConfigError: names each wrong field.
    """
    return parse(BackendSnapshot, mapping, "snapshot")


def load_snapshot(path: Path | str) -> BackendSnapshot:
    """Read the mounted snapshot.

    Raises:
        ConfigError: missing, not JSON, or not a snapshot.
    """
    return load(BackendSnapshot, path)
