"""Errors of the embedded cluster as the `Status` objects of an API server. Pure.

Called by `kube_api`.
"""

from __future__ import annotations

from typing import Any

from stoker.operator.admission.status_cause import InvalidObject
from stoker.operator.cluster.interface import AlreadyExists, Conflict, Forbidden, Gone, Invalid, NotFound
from stoker.operator.cluster.local.object_storage import StateFolderError

CODES: tuple[tuple[type[Exception], int, str], ...] = (
    (NotFound, 404, "NotFound"),
    (AlreadyExists, 409, "AlreadyExists"),
    (Conflict, 409, "Conflict"),
    (Gone, 410, "Expired"),
    (Invalid, 422, "Invalid"),
    (Forbidden, 403, "Forbidden"),
    (StateFolderError, 507, "InternalError"),
    (ValueError, 400, "BadRequest"),
)


def failure(error: Exception) -> dict[str, Any]:
    """The `Status` of an error, with a cause for each wrong field."""
    code, reason = next(((code, name) for kind, code, name in CODES if isinstance(error, kind)), (500, "InternalError"))
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    status["message"] = str(error)
    if isinstance(error, InvalidObject):
        causes = [{"field": c.field, "message": c.message, "reason": c.reason} for c in error.causes]
        status["details"] = {"causes": causes}
    return status
