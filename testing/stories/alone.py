"""`stoker train` from a shell: manifests in a file, no operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from testing.stories.manifests import Manifest


def train_alone(folder: Path, *manifests: Manifest) -> subprocess.Popen[str]:
    """Start it in a process group of its own, as a shell would; data of claims goes to `folder/storage`."""
    file = folder / "job.yaml"
    file.write_text("\n---\n".join(json.dumps(manifest) for manifest in manifests))
    command = [sys.executable, "-m", "stoker.cli.main", "train", "-f", str(file), "--storage", str(folder / "storage")]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        process_group=0,
    )
