"""`python -m stoker.engine.serve_main`: `stoker serve` as a process. Ctrl-C during its imports is no error."""

from __future__ import annotations

from stoker.pod.collection import imports
from stoker.pod.command_line import run_program


def main() -> int:
    """Run `stoker serve` and return its exit code; 130 when interrupted during the imports."""
    try:
        with imports():
            from stoker.engine.serve import main as serve  # takes a second or two
    except KeyboardInterrupt:
        return 130
    return serve()


if __name__ == "__main__":
    run_program(main, "stoker serve")
