"""The built images, and the store that nodes are cloned from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import binaries, tools
from e2e.images.build import build_images, uv_cache
from e2e.images.builder import Builder
from e2e.images.commands import BuildError, run
from e2e.images.recipe import ALL, CONTROL, CONTROL_NEXT, RUNTIME, Recipe
from e2e.images.seed import SNAPSHOTS
from e2e.images.store import ImageStore

CONTENT = "io.containerd.content.v1.content"
CONTROL_LIMIT_BYTES = 200_000_000


@pytest.fixture(scope="module")
def store() -> ImageStore:
    """The store with every image of this checkout."""
    return build_images()


@pytest.fixture
def folder(store: ImageStore) -> Iterator[Path]:
    """A folder on the store's file system."""
    path = store.folder / "test"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    yield path
    shutil.rmtree(path)


def builder_of(store: ImageStore) -> Builder:
    return Builder(store.folder, uv_cache())


def test_the_control_image_is_small_enough_to_pull_in_seconds(store: ImageStore, folder: Path) -> None:
    source = builder_of(store).reference(CONTROL.name)
    run(["skopeo", "copy", "--quiet", source, f"oci:{folder}:compressed"], what=CONTROL.name)
    size = sum(path.stat().st_size for path in (folder / "blobs").rglob("*") if path.is_file())
    assert size <= CONTROL_LIMIT_BYTES


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_programs_run_as_a_user_without_rights(store: ImageStore, recipe: Recipe) -> None:
    assert builder_of(store).image(recipe.name).settings()["User"] == "65532:65532"


def test_the_next_edition_has_the_same_layers_and_is_another_image(store: ImageStore) -> None:
    first, second = (builder_of(store).image(recipe.name) for recipe in (CONTROL, CONTROL_NEXT))
    assert first.layers == second.layers
    assert first.digest != second.digest


def test_a_second_build_brings_nothing_new(store: ImageStore) -> None:
    index = store.folder / "images.json"
    before = index.stat().st_mtime_ns
    build_images()
    assert index.stat().st_mtime_ns == before
    assert set(store.names()) >= {CONTROL.name, CONTROL_NEXT.name, RUNTIME.name}


def test_unpacked_layers_are_taken_without_a_copy(store: ImageStore, folder: Path) -> None:
    other, builder = ImageStore(folder), builder_of(store)

    assert other.load([CONTROL.name], builder, binaries.build([tools.CONTAINERD])) == [CONTROL.name]

    program = Path("opt/stoker/app/bin/stoker")
    found = [path / "fs" / program for path in (other.root / SNAPSHOTS).iterdir()]
    (unpacked,) = [path for path in found if path.exists()]
    built = [builder.files(diff_id) / program for diff_id in builder.image(CONTROL.name).diff_ids]
    assert [path.samefile(unpacked) for path in built if path.exists()] == [True]


def test_a_layer_that_was_never_built_is_named(store: ImageStore) -> None:
    with pytest.raises(BuildError, match=r"holds no layer sha256:0$"):
        builder_of(store).files("sha256:0")


def test_a_node_gets_every_layer_without_a_copy_and_its_own_databases(store: ImageStore, folder: Path) -> None:
    root = folder / "containerd"
    store.clone_to(root)

    seeds = list((store.root / CONTENT / "blobs" / "sha256").iterdir())
    assert len(seeds) >= 8
    assert all((root / seed.relative_to(store.root)).samefile(seed) for seed in seeds)
    databases = [path.relative_to(store.root) for path in store.root.glob("*/*.db")]
    assert len(databases) >= 2
    assert not any((root / database).samefile(store.root / database) for database in databases)
    shutil.rmtree(root)
    assert all(seed.stat().st_nlink >= 1 and seed.stat().st_size for seed in seeds)


def test_a_store_in_use_is_not_cloned_over(store: ImageStore, folder: Path) -> None:
    (folder / "something").touch()
    with pytest.raises(FileExistsError, match="before its containerd starts"):
        store.clone_to(folder)
