"""Images from the repository's Dockerfiles, by buildah, on a base image made from Debian packages: no Docker, no registry.

Buildah keeps every layer: the one with the dependencies is made again only when the base or a lock file changes, and a change of code costs seconds.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from e2e.images.recipe import BASE_PACKAGES, DEBIAN, REPOSITORY, Recipe, base_name

CACHE_IN_BUILD = "/var/cache/uv"
MACHINE_FILES = ("/etc/ssl/certs", "/etc/pip.conf")
"""How this machine reaches the package index. Mounted while a layer is built, never part of it."""


class BuildError(RuntimeError):
    """A build failed; the message ends with the last lines of its output."""


class Builder:
    """Builds what is not built yet, in a store of its own beside whatever else this machine builds."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        """
        Args:
            folder: where layers are kept.
            wheels: uv's cache on this machine, the one that `make setup` filled.
        """
        self.folder = folder
        self.wheels = wheels

    def reference(self, name: str) -> str:
        """An image of the store as skopeo names it."""
        return f"containers-storage:[overlay@{self.folder / 'layers'}+{self.folder / 'run'}]{name}"

    def id(self, name: str) -> str:
        """Changes with anything in the image."""
        return self._buildah("inspect", "--type=image", "--format={{.FromImageID}}", name, what=name)

    def build(self, recipe: Recipe) -> str:
        """Builds an image; all of its layers may come from the store. Returns its name.

        Raises:
            BuildError: naming the image.
        """
        base = self.base()
        self.wheels.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        self._buildah("bud", *_bud_options(recipe, base, self.wheels), str(REPOSITORY), what=recipe.name)
        say(f"{recipe.name} built in {time.monotonic() - start:.0f} s")
        return recipe.name

    def base(self) -> str:
        """The base image: Debian's minimal system with Python."""
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
        """Drops what interrupted builds left behind; to be called while no other build runs."""
        self._buildah("rm", "--all", what="containers of interrupted builds")

    def prune(self, recipes: Sequence[Recipe]) -> None:
        """Drops layers that belong to no image any more, once a lock file or the base has changed: a large layer is not kept for nothing."""
        locks = sorted({recipe.lock for recipe in recipes})
        key = "\n".join(
            [base_name(), *(hashlib.sha256((REPOSITORY / lock).read_bytes()).hexdigest() for lock in locks)]
        )
        known = self.folder / "layers.key"
        if known.exists() and known.read_text() != key:
            self._buildah("rmi", "--prune", what="layers of an earlier lock file")
        known.write_text(key)

    def _buildah(self, verb: str, *arguments: str, what: str, check: bool = True) -> str:
        places = [f"--root={self.folder / 'layers'}", f"--runroot={self.folder / 'run'}", "--storage-driver=overlay"]
        return run(["buildah", *places, verb, *arguments], what=what, check=check)


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
        *(f"--volume={volume}" for volume in volumes),
        *(f"--label={name}={value}" for name, value in recipe.labels.items()),
        f"--ignorefile={REPOSITORY / recipe.ignore_file}",
        f"--file={REPOSITORY / recipe.dockerfile}",
        f"--tag={recipe.name}",
    ]


def run(command: Sequence[str], *, what: str, check: bool = True) -> str:
    """The program's standard output without its last newline.

    Raises:
        BuildError: it failed and `check` is set.
    """
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"}, check=False)
    if check and done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise BuildError(f"{what}: {command[0]} ended with {done.returncode}:\n{last}")
    return done.stdout.strip()


def say(line: str) -> None:
    """Progress: a first build takes minutes."""
    print(f"images: {line}", file=sys.stderr, flush=True)
