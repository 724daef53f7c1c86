"""Guards on the shape of the repository: packaging, the four source roots, lock files and sizes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ["model", "trainer", "engine", "operator"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]


def test_wheel_and_editable_install_list_all_source_roots() -> None:
    build = PROJECT["tool"]["hatch"]["build"]
    assert build["dev-mode-dirs"] == SOURCE_ROOTS
    assert build["targets"]["wheel"]["packages"] == [f"{root}/stoker" for root in SOURCE_ROOTS]


def test_type_checkers_see_all_source_roots() -> None:
    assert PROJECT["tool"]["mypy"]["explicit_package_bases"] is True
    assert PROJECT["tool"]["mypy"]["mypy_path"] == SOURCE_ROOTS
    assert PROJECT["tool"]["pyright"]["extraPaths"] == SOURCE_ROOTS


def test_no_package_marker_hides_a_source_root_or_the_standard_library() -> None:
    """`__init__.py` is allowed below `<root>/stoker/<package>/` only; it holds a docstring, the package's contract."""
    markers = [path.relative_to(ROOT) for path in tracked_files() if path.name == "__init__.py"]
    allowed = [path for path in markers if path.parts[0] in SOURCE_ROOTS and len(path.parts) > 3]
    assert markers == allowed, "any other marker would hide the other source roots or the standard library"


def test_package_markers_hold_a_contract_and_no_code() -> None:
    for path in tracked_files():
        if path.name == "__init__.py":
            body = ast.parse(path.read_text()).body
            assert len(body) == 1, f"{path} holds code"
            assert isinstance(body[0], ast.Expr), f"{path} has no docstring"


def test_the_standard_library_operator_is_not_shadowed() -> None:
    code = "import operator, stoker.operator.domain.plan; print(operator.itemgetter(0)('a'))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.stdout.strip(), run.stderr) == ("a", "")


def test_every_package_is_importable_from_its_own_root() -> None:
    code = (
        "import stoker.pod.causes, stoker.checkpoint.manifest, stoker.model.config, stoker.trainer.protocol.config,"
        "stoker.engine.config, stoker.router.config, stoker.operator.domain.plan, stoker.gateway.config,"
        "stoker.cli.main"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def imported_names(text: str) -> set[str]:
    """Modules of the product, or names in them, that a module imports anywhere: in functions and for types, too."""
    pattern = r"^ *(?:import (stoker\.[\w.]+)|from (stoker\.[\w.]+) import (?:\(([^)]*)\)|(.*)))"
    found = set()
    for module, package, inside, behind in re.findall(pattern, text, flags=re.MULTILINE):
        names = re.findall(r"(\w+)(?: as \w+)?", re.sub("#.*", "", inside or behind))
        found |= {module or package, *(f"{package}.{name}" for name in names)}
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not for types either: what two modules need of each other belongs below both, or is a protocol."""
    paths = [path for root in SOURCE_ROOTS for path in (ROOT / root / "stoker").rglob("*.py")]
    texts = {".".join(path.relative_to(ROOT).with_suffix("").parts[1:]): path.read_text() for path in paths}
    imports = {name: imported_names(text) & texts.keys() for name, text in texts.items()}
    assert sum(map(len, imports.values())) > len(imports), "imports are found"
    TopologicalSorter(imports).prepare()


@pytest.mark.parametrize(
    "module",
    [
        "stoker.pod.http",
        "stoker.checkpoint.reader",
        "stoker.router.config",
        "stoker.operator.domain.plan",
        "stoker.gateway.http.app",
        "stoker.cli.main",
        "stoker.engine.core.scheduler",
        "stoker.engine.core.blocks",
        "stoker.engine.core.request",
    ],
)
def test_module_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("name", ["setup.txt", "dev.txt", "control.txt", "runtime.txt"])
def test_lock_file_pins_by_hash_and_names_no_address(name: str) -> None:
    text = (ROOT / "lock" / name).read_text()
    pins = re.findall(r"^[A-Za-z0-9_.\[\]-]+==", text, flags=re.MULTILINE)
    assert pins
    assert "://" not in text
    for block in re.split(r"\n(?=[A-Za-z0-9])", text):
        assert "--hash=sha256:" in block, block


def test_the_control_image_has_no_torch() -> None:
    assert not re.search(r"^(torch|triton|nvidia)", (ROOT / "lock/control.txt").read_text(), flags=re.MULTILINE)


def test_no_file_is_a_collection_of_odds_and_ends() -> None:
    odd = {"utils.py", "util.py", "common_utils.py", "helpers.py", "misc.py"}
    assert [str(path) for path in tracked_files() if path.name in odd] == []


def is_picture(path: Path) -> bool:
    """A screenshot of the documentation."""
    return path.suffix == ".png" and path.parent == ROOT / "docs" / "images"


def test_no_file_is_large_or_binary() -> None:
    for path in tracked_files():
        content = path.read_bytes()
        if is_picture(path):
            assert content.startswith(b"\x89PNG"), path
            assert len(content) < 150_000, f"{path} has {len(content)} bytes"
            continue
        assert len(content) < 1_000_000, f"{path} has {len(content)} bytes"
        assert b"\0" not in content, f"{path} is binary"


def test_no_path_of_a_machine_is_committed() -> None:
    pattern = re.compile(r"(?<![\w.-])/(root|home/\w+|work)/")
    for path in tracked_files():
        if is_picture(path):
            continue
        found = pattern.search(path.read_text(encoding="utf-8"))
        assert found is None or path == Path(__file__), f"{path}: {found and found.group()}"
