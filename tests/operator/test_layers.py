"""The operator's import graph: few edges between its folders, no circle. import-linter holds the layers."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2] / "operator" / "stoker" / "operator"
PACKAGE = "stoker.operator."
MOST_EDGES = 20


def imported(file: Path) -> set[str]:
    """Return the folders and files at the top of the operator that `file` imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {module.removeprefix(PACKAGE).partition(".")[0] for module in modules if module.startswith(PACKAGE)}
    return found


def graph() -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for file in ROOT.rglob("*.py"):
        top = file.relative_to(ROOT).parts[0].removesuffix(".py")
        edges.setdefault(top, set()).update(imported(file) - {top})
    return edges


def test_the_folders_of_the_operator_have_few_edges_and_no_circle() -> None:
    edges = graph()
    assert {"api", "domain", "render", "admission", "cluster", "loop", "reconcile", "service"} <= edges.keys()
    assert sum(map(len, edges.values())) <= MOST_EDGES
    TopologicalSorter(edges).prepare()
