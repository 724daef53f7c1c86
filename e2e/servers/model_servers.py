"""Servers of others that models are fetched from and pushed to, as processes of this machine: S3 and OCI.

`versitygw` serves a folder by the S3 protocol, `registry` is that of the distribution project. Both want a password.
The tests of `tests/checkpoint` have servers of our own in their place, which can break connections.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from e2e.cluster import binaries, tools
from e2e.cluster.processes import Program, wait_for_program
from e2e.cluster.tools import Tool
from testing.free_port import free_port

START_S = 240.0
USER, PASSWORD = "tester", "PasswordOnlyForTests"
HTPASSWD = f"{USER}:$2b$04$65Y4aXd99XN9/a8e447YZOf3ymTqfsG6XDF.TvW2zl3n2buanISPm\n"
"""The password's hash, as `htpasswd -B` makes it."""


@dataclass(frozen=True)
class ModelServer:
    """A server that runs: its `host:port`, and the variables of a client that may read and write."""

    place: str
    access: dict[str, str]


@contextmanager
def bucket_server(folder: Path, *buckets: str) -> Iterator[ModelServer]:
    """Serve buckets below a folder."""
    for name in buckets:
        (folder / "root" / name).mkdir(parents=True)
    (folder / "sidecar").mkdir()
    place = f"127.0.0.1:{free_port()}"
    flags = ["--access", USER, "--secret", PASSWORD, "--port", place, "--quiet", "posix"]
    flags += ["--sidecar", str(folder / "sidecar"), str(folder / "root")]  # not every file system has user attributes
    with _running(tools.VERSITYGW, folder, flags, place):
        access = {"AWS_ENDPOINT_URL": f"http://{place}", "AWS_REGION": "us-east-1"}
        yield ModelServer(place, {**access, "AWS_ACCESS_KEY_ID": USER, "AWS_SECRET_ACCESS_KEY": PASSWORD})


@contextmanager
def registry_server(folder: Path) -> Iterator[ModelServer]:
    """Serve an empty registry."""
    place = f"127.0.0.1:{free_port()}"
    (folder / "htpasswd").write_text(HTPASSWD)
    config = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "images")}},
        "http": {"addr": place, "secret": "SecretOnlyForTests"},
        "auth": {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}},
    }
    (folder / "registry.json").write_text(json.dumps(config))  # JSON is YAML
    with _running(tools.REGISTRY, folder, ["serve", str(folder / "registry.json")], place):
        yield ModelServer(place, {"REGISTRY_USERNAME": USER, "REGISTRY_PASSWORD": PASSWORD})


@contextmanager
def _running(tool: Tool, folder: Path, flags: list[str], place: str) -> Iterator[None]:
    program = Program(tool.name, folder)
    (name,) = tool.programs.values()
    program.start([str(binaries.find_optional(tool) / name), *flags], detached=False)
    try:
        wait_for_program(program, lambda: _answers(place), what="its first answer", timeout_s=START_S)
        yield
    finally:
        program.stop()


def _answers(place: str) -> bool:
    try:
        return httpx.get(f"http://{place}/v2/", timeout=10, trust_env=False).status_code < 500
    except httpx.TransportError:
        return False
