"""The folder with the cluster's programs: `STOKER_KUBE_BIN`, or built once from the Go module proxy into the cache.

    python -m e2e.cluster.binaries              build what is missing, print the folder
    python -m e2e.cluster.binaries etcd helm    only these tools
    python -m e2e.cluster.binaries kueue        a controller of others, which no other target needs

Each tool is built into a folder of its own, named by a digest of its `go.mod`, `go.sum` and build flags, and published
by a rename: a change of one pinned version builds that tool and no other, and a build that was interrupted leaves
nothing that looks finished. One lock per tool keeps two processes from building it twice.

Go's own caches (9 GB for all tools) are kept only while something is built, unless `GOCACHE` and `GOMODCACHE` name
folders.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from e2e.cluster import tools
from e2e.cluster.tools import Tool

CACHE_VARIABLE = "STOKER_CACHE"
BIN_VARIABLE = "STOKER_KUBE_BIN"


class MissingBinaries(RuntimeError):
    """Raised if a program of the cluster is missing or could not be built; the message names the remedy."""


def cache() -> Path:
    """Return the folder that keeps built programs, node stores and images between runs."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "stoker") / "kube"


def bin_folder() -> Path:
    """Return the flat folder for all programs, with the CNI plugins in `cni/`; it may not exist yet."""
    if given := os.environ.get(BIN_VARIABLE):
        return Path(given).resolve()
    key = hashlib.sha256(" ".join(tool.key for tool in tools.ALL).encode()).hexdigest()[:12]
    return cache() / key / "bin"


def folder_of(tool: Tool) -> Path:
    """Return the folder of one tool's programs; it may not exist yet. Optional tools have one of their own."""
    if os.environ.get(BIN_VARIABLE) or tool in tools.ALL:
        return bin_folder()
    return cache() / "tools" / tool.key


def find_optional(tool: Tool) -> Path:
    """Return the folder with the programs of an optional tool and its `files/`; build nothing.

    Raises:
        MissingBinaries: it is not built.
    """
    folder = folder_of(tool)
    if missing := missing_programs(tool, folder):
        raise MissingBinaries(
            f"no {', '.join(missing)} in {folder}; build it with: python -m e2e.cluster.binaries {tool.name}"
        )
    return folder


def find(wanted: Iterable[Tool] = tools.ALL) -> Path:
    """Return the folder with the programs of the `wanted` tools; build nothing.

    Raises:
        MissingBinaries: naming the programs that are not there.
    """
    folder = bin_folder()
    missing = [name for tool in wanted for name in missing_programs(tool, folder)]
    if missing:
        advice = (
            f"is {BIN_VARIABLE} the right folder?"
            if os.environ.get(BIN_VARIABLE)
            else "build them with: make kube-binaries"
        )
        raise MissingBinaries(f"no {', '.join(missing)} in {folder}; {advice}")
    return folder


def missing_programs(tool: Tool, folder: Path) -> list[str]:
    """Return the programs of one tool that `folder` lacks."""
    return [name for name in tool.programs.values() if not os.access(folder / name, os.X_OK)]


def build(wanted: Iterable[Tool] = tools.ALL) -> Path:
    """Build the `wanted` tools that are missing and return the folder with all of them.

    Raises:
        MissingBinaries: if Go is missing or too old, or a build failed (with the end of its output).
    """
    if os.environ.get(BIN_VARIABLE):
        return find(wanted)
    folder = bin_folder()
    if missing := [tool for tool in wanted if missing_programs(tool, folder_of(tool))]:
        with _go_caches(cache() / "go") as caches:
            for tool in missing:
                built = _built(tool, caches)
                if tool in tools.ALL:
                    _publish(tool, built, folder)
    return folder


@contextmanager
def _go_caches(folder: Path) -> Iterator[dict[str, str]]:
    """Set variables that put Go's caches below `folder`.

    The last build to end removes the folder, together with the rest of an interrupted build.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        try:
            yield {"GOCACHE": str(folder / "build"), "GOMODCACHE": str(folder / "modules")}
        finally:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _built(tool: Tool, caches: dict[str, str]) -> Path:
    """Return the cache folder of one tool; build it if it is missing."""
    target = cache() / "tools" / tool.key
    if target.is_dir():
        return target
    with _locked(cache() / "tools" / f"{tool.key}.lock"):
        if not target.is_dir():
            _compile(tool, target, caches)
    return target


def _compile(tool: Tool, target: Path, caches: dict[str, str]) -> None:
    """Run `go build` for one package after the other, then rename the result to `target`."""
    go = shutil.which("go")
    if go is None:
        raise MissingBinaries(
            f"building {tool.name} needs Go on the PATH (https://go.dev/dl), or ready programs in {BIN_VARIABLE}"
        )
    draft = target.with_suffix(f".{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    start = time.monotonic()
    print(f"building {tool.name} (once; minutes on a small machine)", file=sys.stderr, flush=True)
    modules = draft.with_suffix(".modules")
    patched = _patched(tool, modules, caches)
    stamps = "".join(f" -X {name}={value}" for name, value in tool.stamps.items())
    for package, name in tool.programs.items():
        command = [
            go,
            "build",
            "-trimpath",
            "-ldflags",
            f"-s -w{stamps}",
            "-tags",
            ",".join(tool.tags),
            *patched,
            "-o",
            str(draft / name),
            package,
        ]
        _go(tool, command, caches)
    for path in tool.files:
        _keep(tool, path, draft / "files", caches)
    shutil.rmtree(modules, ignore_errors=True)
    draft.rename(target)
    print(f"built {tool.name} in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def _keep(tool: Tool, path: str, target: Path, caches: dict[str, str]) -> None:
    """Copy files of a dependency, given as `MODULE/PATH`, below `target`."""
    source = _source(tool, path, caches)
    target.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target / source.name)
    else:
        shutil.copy(source, target)


def _source(tool: Tool, path: str, caches: dict[str, str]) -> Path:
    """Return where a file of a dependency, given as `MODULE/PATH`, lies in Go's cache; download it if needed."""
    module = _module_of(tool, path)
    downloaded = json.loads(_go(tool, [str(shutil.which("go")), "mod", "download", "-json", module], caches))
    return Path(downloaded["Dir"]) / path.removeprefix(f"{module}/")


def _patched(tool: Tool, folder: Path, caches: dict[str, str]) -> list[str]:
    """Copy the modules of `tool.replaced` below `folder`, with our files in them; return the flag that selects them."""
    if not tool.replaced:
        return []
    shutil.rmtree(folder, ignore_errors=True)
    recipe = (tool.module / "go.mod").read_text()
    for path, own in tool.replaced.items():
        source, module = _source(tool, path, caches), _module_of(tool, path)
        inside = Path(path.removeprefix(f"{module}/"))
        copy = folder / module
        shutil.copytree(source.parents[len(inside.parts) - 1], copy, dirs_exist_ok=True)
        shutil.copy(tool.module / own, copy / inside)
        recipe += f"\nreplace {module} => {copy}\n"
    (folder / "go.mod").write_text(recipe)
    shutil.copy(tool.module / "go.sum", folder / "go.sum")
    return ["-modfile", str(folder / "go.mod")]


def _module_of(tool: Tool, path: str) -> str:
    """Return the module of a file, given as `MODULE/PATH`."""
    return next(module for module in _modules(tool) if path.startswith(f"{module}/"))


def _modules(tool: Tool) -> Iterator[str]:
    """Yield the modules that `go.mod` requires."""
    for line in (tool.module / "go.mod").read_text().splitlines():
        words = line.split()
        if line.startswith("\t") and len(words) > 1 and words[1].startswith("v"):
            yield words[0]


def _go(tool: Tool, command: list[str], caches: dict[str, str]) -> str:
    flags = "-mod=readonly -modcacherw -buildvcs=false"
    environment = {**caches, **os.environ, "GOTOOLCHAIN": "local", "CGO_ENABLED": "0", "GOFLAGS": flags}
    done = subprocess.run(command, cwd=tool.module, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = " | ".join(done.stderr.strip().splitlines()[-5:])
        raise MissingBinaries(f"go {command[1]} of {command[-1]} in {tool.module} failed: {last}")
    return done.stdout


def _publish(tool: Tool, built: Path, folder: Path) -> None:
    """Link one tool's programs into the common folder; each link appears whole or not at all."""
    for name in tool.programs.values():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        draft = link.with_name(f".{link.name}.{os.getpid()}")
        draft.unlink(missing_ok=True)
        draft.symlink_to(built / name)
        draft.replace(link)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(names: list[str]) -> int:
    """Build the tools on the command line (default: all) and print the folder."""
    known = {tool.name: tool for tool in (*tools.ALL, *tools.OPTIONAL)}
    if unknown := [name for name in names if name not in known]:
        print(f"no tool {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    try:
        print(build([known[name] for name in names] or tools.ALL))
    except MissingBinaries as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
