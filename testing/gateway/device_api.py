"""`resource.k8s.io` as an API server has it: discovery, and lists of the objects that a test puts there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from stoker.operator.domain.plan import Object

ROOT = "/apis/resource.k8s.io"


class DeviceApi:
    """The devices and claims of a cluster. Without a version the group is not there."""

    def __init__(self) -> None:
        self.versions: tuple[str, ...] = ()
        self.objects: list[Object] = []

    def serve(self, *objects: Object, versions: tuple[str, ...] = ("v1", "v1beta2")) -> None:
        """Serve these objects."""
        self.objects, self.versions = list(objects), versions

    def routes(self) -> list[Route]:
        """The routes, before those of the embedded cluster."""
        return [
            Route(ROOT, self._group),
            Route(ROOT + "/{version}/resourceslices", self._listing("ResourceSlice")),
            Route(ROOT + "/{version}/resourceclaims", self._listing("ResourceClaim")),
            Route(ROOT + "/{version}/namespaces/{namespace}/resourceclaims", self._listing("ResourceClaim")),
        ]

    async def _group(self, _: Request) -> JSONResponse:
        found = [{"groupVersion": f"resource.k8s.io/{one}", "version": one} for one in self.versions]
        return JSONResponse({"kind": "APIGroup", "versions": found}) if found else _missing()

    def _listing(self, kind: str) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def answer(request: Request) -> JSONResponse:
            if request.path_params["version"] not in self.versions:
                return _missing()
            namespace = request.path_params.get("namespace")
            items = [
                found
                for found in self.objects
                if found["kind"] == kind and namespace in (None, found["metadata"].get("namespace"))
            ]
            return JSONResponse({"metadata": {"resourceVersion": "1"}, "items": items})

        return answer


def _missing() -> JSONResponse:
    message = "the server could not find the requested resource"
    return JSONResponse({"kind": "Status", "code": 404, "reason": "NotFound", "message": message}, 404)
