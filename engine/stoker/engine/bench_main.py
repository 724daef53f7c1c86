"""`python -m stoker.engine.bench_main`: `stoker bench throughput | latency`. Ctrl-C is no error of the program."""

from __future__ import annotations

from stoker.pod.collection import imports
from stoker.pod.command_line import INTERRUPTED, run_program


def main() -> int:
    """Run the bench and return its exit code; 130 when interrupted, also during the imports."""
    try:
        with imports():
            from stoker.engine.bench.program import main as bench  # takes a second or two

        return bench()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    run_program(main, "stoker bench")
