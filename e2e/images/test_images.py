"""The images as they were built, and the store that nodes are cloned from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.images.build import build_images, uv_cache
from e2e.images.builder import Builder, run
from e2e.images.layout import Layout, blob_path
from e2e.images.recipe import ALL, CONTROL, CONTROL_NEXT, RUNTIME, Recipe
from e2e.images.store import CONTENT, ImageStore

CONTROL_LIMIT_BYTES = 200_000_000


@pytest.fixture(scope="module")
def store() -> ImageStore:
    """Every image of this checkout, built and in the store."""
    return build_images()


@pytest.fixture
def folder(store: ImageStore) -> Iterator[Path]:
    """A folder on the store's file system."""
    path = store.folder / "test"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    yield path
    shutil.rmtree(path)


def configuration(store: ImageStore, name: str) -> dict[str, object]:
    layout = Layout(store.folder / "layout")
    manifest = json.loads(layout.blob(layout.manifest(name.rpartition("/")[2].replace(":", "-"))["digest"]).read_text())
    return dict(json.loads(layout.blob(manifest["config"]["digest"]).read_text())["config"])


def test_the_control_image_is_small_enough_to_pull_in_seconds(store: ImageStore, folder: Path) -> None:
    source = Builder(store.folder, uv_cache()).reference(CONTROL.name)
    run(["skopeo", "copy", "--quiet", source, f"oci:{folder}:compressed"], what=CONTROL.name)
    size = sum(path.stat().st_size for path in (folder / "blobs").rglob("*") if path.is_file())
    assert size <= CONTROL_LIMIT_BYTES


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_programs_run_as_a_user_without_rights(store: ImageStore, recipe: Recipe) -> None:
    assert configuration(store, recipe.name)["User"] == "65532:65532"


def test_the_next_edition_has_the_same_layers_and_is_another_image(store: ImageStore) -> None:
    layout = Layout(store.folder / "layout")
    first, second = (layout.manifest(f"control-{tag}") for tag in ("e2e", "e2e-next"))
    layers = [json.loads(layout.blob(found["digest"]).read_text())["layers"] for found in (first, second)]
    assert layers[0] == layers[1]
    assert first["digest"] != second["digest"]


def test_a_second_build_brings_nothing_new(store: ImageStore) -> None:
    index = store.folder / "images.json"
    before = index.stat().st_mtime_ns
    build_images()
    assert index.stat().st_mtime_ns == before
    assert set(store.names()) == {CONTROL.name, CONTROL_NEXT.name, RUNTIME.name}


def test_a_node_gets_every_layer_without_a_copy_and_its_own_databases(store: ImageStore, folder: Path) -> None:
    root = folder / "containerd"
    store.clone_to(root)

    seeds = list((store.root / CONTENT / "blobs" / "sha256").iterdir())
    assert len(seeds) >= 8
    for seed in seeds:
        assert blob_path(root / CONTENT, f"sha256:{seed.name}").samefile(seed)
    databases = [path.relative_to(store.root) for path in store.root.glob("*/*.db")]
    assert len(databases) >= 2
    assert not any((root / database).samefile(store.root / database) for database in databases)
    shutil.rmtree(root)
    assert all(seed.stat().st_nlink >= 1 and seed.stat().st_size for seed in seeds)


def test_a_store_in_use_is_not_cloned_over(store: ImageStore, folder: Path) -> None:
    (folder / "something").touch()
    with pytest.raises(FileExistsError, match="before its containerd starts"):
        store.clone_to(folder)
