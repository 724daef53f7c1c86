"""Parameters of a query: one that a route does not have is refused, as a mistyped namespace would go elsewhere."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from stoker.gateway.problem import FieldProblem, Problem


async def known_query(request: Request) -> None:
    """Check the names in the query. Raises Problem 422 with each unknown one."""
    known = parameters_of(request.scope["route"].dependant)
    unknown = sorted(set(request.query_params) - known)
    if not unknown:
        return
    allowed = f"allowed here: {', '.join(sorted(known))}" if known else "this route has none"
    errors = [FieldProblem(field=f"query.{name[:100]}", message=f"no such parameter; {allowed}") for name in unknown]
    raise Problem(422, "invalid", f"{errors[0].field}: {errors[0].message}", errors=errors)


def parameters_of(dependant: Any) -> set[str]:
    """The names of a route's query parameters, those of its dependencies included."""
    own = {field.alias for field in dependant.query_params}
    return own.union(*(parameters_of(one) for one in dependant.dependencies))
