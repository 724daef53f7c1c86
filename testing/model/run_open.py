"""A process that opens one foreign file or folder and prints the outcome, with its CPU time and memory."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from stoker.model.tokenizer import Tokenizer
from stoker.pod.collection import imports


def open_path(path: Path) -> None:
    if path.suffix == ".safetensors":
        with imports():
            from stoker.model.weights.hugging_face import headers  # torch, which the others do not need

        list(headers(path))
    else:
        Tokenizer.open(path)


def memory_mib(field: str) -> float:
    return int(Path("/proc/self/status").read_text().split(field)[1].split()[0]) / 1024


def main() -> None:
    path = Path(sys.argv[1])
    before, began = memory_mib("VmRSS:"), time.process_time()
    try:
        open_path(path)
        outcome = "opened"
    except ValueError as error:
        outcome = f"refused: {error}"
    cost = {"cpu_s": time.process_time() - began, "mib": memory_mib("VmHWM:") - before}
    print(json.dumps({"outcome": outcome} | cost))


if __name__ == "__main__":
    main()
