"""A folder of manifests as Flux takes it from a source: an archive over HTTP, named by an ExternalArtifact.

In place of source-controller, which cannot be built here, the test serves the archives. ExternalArtifact is Flux's
own kind for sources of others.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from e2e.api.api_client import ApiRefused, Object
from e2e.api.world import World, eventually

EXAMPLE = Path(__file__).parents[2] / "deploy" / "gitops" / "flux-kustomization.yaml"


@dataclass
class Flux:
    """Sources and Kustomizations of one namespace."""

    world: World
    url: str
    archives: dict[str, bytes]
    names: list[str] = field(default_factory=list)

    async def publish(self, name: str, *manifests: Object) -> str:
        """Make these manifests the newest revision of a source and return the revision."""
        files = {f"{number}.yaml": yaml.safe_dump(self._placed(one)) for number, one in enumerate(manifests)}
        archive = _archive({"kustomization.yaml": yaml.safe_dump({"resources": sorted(files)}), **files})
        digest = hashlib.sha256(archive).hexdigest()
        path = f"{name}/{digest}.tar.gz"
        self.archives[path] = archive
        artifact = {
            "path": path,
            "url": f"{self.url}/{path}",
            "revision": f"main@sha256:{digest}",
            "digest": f"sha256:{digest}",
            "size": len(archive),
            "lastUpdateTime": "2026-01-01T00:00:00Z",
        }
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Succeeded",
            "message": "stored",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        source = {"apiVersion": "source.toolkit.fluxcd.io/v1", "kind": "ExternalArtifact", "metadata": {"name": name}}
        await self.world.api.apply(self._placed({**source, "spec": {}}), "test", force=True)
        status = {"status": {"artifact": artifact, "conditions": [ready]}}
        await self.world.api.patch("ExternalArtifact", self.world.namespace, name, status, "status")
        return str(artifact["revision"])

    async def follow(self, name: str, **spec: Any) -> None:
        """Apply the Kustomization of `deploy/gitops` for the source of that name, with short periods."""
        body = yaml.safe_load(EXAMPLE.read_text())
        body["metadata"] = {"name": name, "namespace": self.world.namespace}
        source = {"kind": "ExternalArtifact", "name": name}
        periods = {"interval": "2s", "retryInterval": "2s", "timeout": "10m"}
        body["spec"] = {**body["spec"], "path": "./", "sourceRef": source, **periods, **spec}
        await self.world.api.apply(body, "test", force=True)
        self.names.append(name)

    async def suspend(self) -> None:
        """Let Flux leave all Kustomizations alone."""
        for name in self.names:
            await self.world.api.patch("Kustomization", self.world.namespace, name, {"spec": {"suspend": True}})

    async def conditions(self, name: str) -> dict[str, Object]:
        """Return the conditions of a Kustomization by type."""
        found = await self.world.get("Kustomization", name)
        return {one["type"]: one for one in found.get("status", {}).get("conditions", ())}

    async def is_ready(self, name: str, revision: str) -> None:
        """Wait until everything of a revision is applied and healthy."""

        async def reached() -> bool:
            found = await self.world.get("Kustomization", name)
            ready = (await self.conditions(name)).get("Ready", {})
            return ready.get("status") == "True" and found["status"].get("lastAppliedRevision") == revision

        await self._soon(name, reached, f"{name} is Ready at {revision}")

    async def says(self, name: str, kind: str, text: str) -> None:
        """Wait until a condition that is not True has that text in its reason or message."""

        async def reached() -> bool:
            found = (await self.conditions(name)).get(kind, {})
            return found.get("status") != "True" and text in f"{found.get('reason')}: {found.get('message')}"

        await self._soon(name, reached, f"{kind} of {name} says {text}")

    async def inventory(self, name: str) -> list[str]:
        """Return the ids of the objects that a Kustomization manages."""
        found = await self.world.get("Kustomization", name)
        return sorted(one["id"] for one in found["status"]["inventory"]["entries"])

    async def _soon(self, name: str, reached: Any, what: str) -> None:
        try:
            await eventually(reached, within_s=180, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}; {await self.conditions(name)}") from error

    def _placed(self, body: Object) -> Object:
        return {**body, "metadata": {**body["metadata"], "namespace": self.world.namespace}}


@contextlib.asynccontextmanager
async def flux(world: World) -> AsyncIterator[Flux]:
    """Serve archives for the sources of a namespace; at the end its Kustomizations are suspended."""
    archives: dict[str, bytes] = {}

    async def answer(request: web.BaseRequest) -> web.Response:
        body = archives.get(request.path.removeprefix("/"))
        return web.Response(status=404) if body is None else web.Response(body=body)

    runner = web.ServerRunner(web.Server(answer, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found = Flux(world, f"http://127.0.0.1:{runner.addresses[0][1]}", archives)
    try:
        yield found
    finally:
        with contextlib.suppress(ApiRefused):
            await found.suspend()
        await runner.cleanup()


def _archive(files: dict[str, str]) -> bytes:
    """Return a tar.gz with these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            content = text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()
