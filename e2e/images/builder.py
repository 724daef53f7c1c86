"""Images from the repository's Dockerfiles, built by buildah on a base image of Debian packages.

Neither Docker nor a registry is needed.

Buildah keeps every layer. Layers with dependencies are rebuilt only when the base or a lock file changes, so a change
of code costs seconds.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from e2e.images.built import BuiltImage
from e2e.images.commands import BuildError, run, run_bytes, say
from e2e.images.recipe import BASE_PACKAGES, DEBIAN, REPOSITORY, Recipe, base_name

CACHE_IN_BUILD = "/var/cache/uv"
MACHINE_FILES = ("/etc/ssl/certs", "/etc/pip.conf")
"""Configuration for access to the package index. Mounted while a layer is built, never part of it."""
DRIVER = "overlay"
DRIVER_OPTION = "overlay.skip_mount_home=true"
"""Layers lie on the file system of the store, not on a mount of their own: files there can be linked from elsewhere."""


class Builder:
    """A builder of missing images, in a store of its own."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        """Use a store of layers and a cache of wheels.

        Args:
            folder: the folder of the layers.
            wheels: uv's cache on this machine, the one that `make setup` filled.
        """
        self.folder = folder
        self.wheels = wheels

    def reference(self, name: str) -> str:
        """Return an image of the store as skopeo names it."""
        place = f"{DRIVER}@{self.folder / 'layers'}+{self.folder / 'run'}:{DRIVER_OPTION}"
        return f"containers-storage:[{place}]{name}"

    def id(self, name: str) -> str:
        """Return the image's id, which changes with its content."""
        return self._buildah("inspect", "--type=image", "--format={{.FromImageID}}", name, what=name)

    def image(self, name: str) -> BuiltImage:
        """Return a built image.

        Raises:
            BuildError: it is not built.
        """
        documents = [
            run_bytes(["skopeo", "inspect", "--raw", *config, self.reference(name)], what=name)
            for config in ([], ["--config"])
        ]
        return BuiltImage(name, *documents)

    def files(self, diff_id: str) -> Path:
        """Return a layer's folder, with overlay's own marks for deleted files."""
        return self.folder / "layers" / DRIVER / self._layer(diff_id) / "diff"

    @contextmanager
    def archive(self, diff_id: str) -> Iterator[IO[bytes]]:
        """Stream a layer's archive, uncompressed; the reader compares the digest."""
        program = ["containers-storage", *self._place("--graph", "--run"), "diff", "--uncompressed"]
        with subprocess.Popen([*program, self._layer(diff_id)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            yield process.stdout

    def _layer(self, diff_id: str) -> str:
        layers = json.loads((self.folder / "layers" / f"{DRIVER}-layers" / "layers.json").read_text())
        found = [layer["id"] for layer in layers if layer.get("diff-digest") == diff_id]
        if not found:
            raise BuildError(f"{self.folder} holds no layer {diff_id}")
        return str(found[0])

    def _place(self, root: str, runroot: str) -> list[str]:
        """Return the options that select this store."""
        places = [f"{root}={self.folder / 'layers'}", f"{runroot}={self.folder / 'run'}"]
        return [*places, f"--storage-driver={DRIVER}", f"--storage-opt={DRIVER_OPTION}"]

    def build(self, recipe: Recipe) -> str:
        """Build an image and return its name; all of its layers may come from the store.

        Raises:
            BuildError: naming the image.
        """
        base = self.base()
        self.wheels.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        self._buildah("bud", *_bud_options(recipe, base, self.wheels), str(recipe.context), what=recipe.name)
        say(f"{recipe.name} built in {time.monotonic() - start:.0f} s")
        return recipe.name

    def base(self) -> str:
        """Build the base image: Debian's minimal system with Python."""
        name = base_name()
        if self._buildah("images", "--quiet", name, what=name, check=False):
            return name
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            tar = f"{folder}/base.tar"
            run(
                ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}", DEBIAN, tar],
                what=name,
            )
            container = self._buildah("from", "scratch", what=name)
            self._buildah("add", "--quiet", container, tar, "/", what=name)
            self._buildah("commit", "--quiet", "--rm", container, name, what=name)
        say(f"{name} made in {time.monotonic() - start:.0f} s")
        return name

    def clear(self) -> None:
        """Remove what interrupted builds left behind, and a mount that hides the layers.

        Call it while no other build runs.
        """
        layers = self.folder / "layers" / DRIVER
        if layers.is_mount():
            run(["umount", str(layers)], what="the mount of another builder on the layers")
        self._buildah("rm", "--all", what="containers of interrupted builds")

    def prune(self, recipes: Sequence[Recipe]) -> None:
        """Remove layers of no image once their inputs have changed; large layers take too much disk to stay."""
        files = sorted({file for recipe in recipes for file in recipe.large_layers})
        hashes = [hashlib.sha256((REPOSITORY / file).read_bytes()).hexdigest() for file in files]
        key = "\n".join([base_name(), *hashes])
        known = self.folder / "layers.key"
        if known.exists() and known.read_text() != key:
            self._buildah("rmi", "--prune", what="layers of earlier images")
        known.write_text(key)

    def _buildah(self, verb: str, *arguments: str, what: str, check: bool = True) -> str:
        command = ["buildah", *self._place("--root", "--runroot"), verb, *arguments]
        return run(command, what=what, check=check)


def _bud_options(recipe: Recipe, base: str, wheels: Path) -> list[str]:
    volumes = [f"{wheels}:{CACHE_IN_BUILD}", *(f"{path}:{path}:ro" for path in MACHINE_FILES if Path(path).exists())]
    return [
        "--isolation=chroot",
        "--network=host",
        "--layers",
        "--format=oci",
        "--timestamp=0",
        "--quiet",
        f"--build-arg=PYTHON_BASE={base}",
        f"--build-arg=UV_OPTIONS=--cache-dir {CACHE_IN_BUILD}",
        "--build-arg=KERNEL_ARCHITECTURES=",
        *(f"--volume={volume}" for volume in volumes),
        *(f"--label={name}={value}" for name, value in recipe.labels.items()),
        f"--ignorefile={REPOSITORY / recipe.ignore_file}",
        f"--file={REPOSITORY / recipe.dockerfile}",
        f"--tag={recipe.name}",
    ]
