"""Health as GitOps tools compute it from files in deploy/gitops: Argo CD's Lua, and Flux's CEL in its order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lupa
import yaml
from cel_expr_python import cel

FOLDER = Path("deploy/gitops")
ORDER = (("inProgress", "InProgress"), ("failed", "Failed"), ("current", "Current"))
"""Flux asks in this order (RFC 0009); where none is true the object is in progress."""


class ArgoHealth:
    """The script of a kind in argocd-cm, run as Argo CD does: `obj` is global, the answer is a table."""

    def __init__(self, kind: str) -> None:
        config = yaml.safe_load((FOLDER / "argocd-cm.yaml").read_text())
        self.script = config["data"][f"resource.customizations.health.stoker.dev_{kind}"]

    def __call__(self, found: Mapping[str, Any]) -> tuple[str, str]:
        lua = lupa.LuaRuntime(register_eval=False, unpack_returned_tuples=True)
        for name in ("os", "io", "debug", "package", "require", "python"):  # Argo CD opens none of them
            lua.globals()[name] = None
        lua.globals().obj = _table(lua, found)
        answer = lua.execute(self.script)
        return str(answer.status), str(answer.message)


class FluxHealth:
    """The expressions of a kind in the Kustomization."""

    def __init__(self, kind: str) -> None:
        document = yaml.safe_load((FOLDER / "flux-kustomization.yaml").read_text())
        (found,) = (one for one in document["spec"]["healthCheckExprs"] if one["kind"] == kind)
        assert found["apiVersion"] == "stoker.dev/v1alpha1"
        names = ("apiVersion", "kind", "metadata", "spec", "status")
        environment = cel.NewEnv(variables=dict.fromkeys(names, cel.Type.DYN))
        self.programs = {name: environment.compile(found[name]) for name, _ in ORDER}

    def __call__(self, found: Mapping[str, Any]) -> str:
        status = found.get("status")
        if status is None:
            return "InProgress"  # an expression that cannot be evaluated is tried again
        if status.get("observedGeneration", found["metadata"]["generation"]) != found["metadata"]["generation"]:
            return "InProgress"
        for name, answer in ORDER:
            outcome = self.programs[name].eval(data=dict(found)).value()
            assert isinstance(outcome, bool), f"{name}: {outcome}"
            if outcome:
                return answer
        return "InProgress"


def _table(lua: Any, value: Any) -> Any:
    """A JSON value as Lua has it."""
    if isinstance(value, Mapping):
        return lua.table_from({key: _table(lua, one) for key, one in value.items() if one is not None})
    if isinstance(value, list | tuple):
        return lua.table_from([_table(lua, one) for one in value])
    return value
