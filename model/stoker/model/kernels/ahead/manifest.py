"""The manifest of a folder of kernels: for which Triton and which GPUs they were compiled. No torch, no Triton.

Written by `build`, read at the start of a process by `layered_cache`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "STOKER_KERNELS"
"""Environment variable that names the folder; `off` where none is to be used."""
MANIFEST = "kernels.json"
FORMAT = 1


@dataclass(frozen=True)
class KernelsManifest:
    triton: str
    """Version of Triton that compiled them: another one has other keys."""
    architectures: tuple[int, ...]
    """Compute capabilities: 90 is sm_90."""
    models: tuple[str, ...]
    """What they were compiled for, for people."""
    num_kernels: int

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n")


def read_manifest(folder: Path) -> KernelsManifest:
    """Read a folder's manifest. Raises ValueError, with the file and what is wrong there."""
    file = folder / MANIFEST
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{file}: format must be {FORMAT}, got {field(found, 'format')}")
    return KernelsManifest(
        triton=checked(file, found, "triton", str),
        architectures=tuple(checked(file, found, "architectures", list)),
        models=tuple(checked(file, found, "models", list)),
        num_kernels=checked(file, found, "num_kernels", int),
    )


def checked(file: Path, found: Mapping[str, Any], name: str, kind: type) -> Any:
    value = field(found, name)
    if not isinstance(value, kind):
        raise ValueError(f"{file}: {name} must be a {kind.__name__}, got {value!r}")
    return value


def field(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, dict) else None


def default_folder() -> Path:
    """The folder of this installation, in the environment that Python runs in."""
    return Path(sys.prefix, "share", "stoker", "kernels")


def find_folder(environment: Mapping[str, str], default: Path) -> Path | None:
    """The folder to use: the one that the environment names, else the installation's, if there is one."""
    named = environment.get(VARIABLE)
    if named == "off":
        return None
    if named:
        return Path(named)
    return default if (default / MANIFEST).exists() else None


def obstacle(manifest: KernelsManifest, triton: str, architecture: int) -> str | None:
    """Why none of the kernels can be used here, or None."""
    if manifest.triton != triton:
        return f"they were compiled by Triton {manifest.triton}, and {triton} is installed"
    if architecture not in manifest.architectures:
        names = ", ".join(f"sm_{one}" for one in manifest.architectures)
        return f"they were compiled for {names}, and this GPU is sm_{architecture}"
    return None
