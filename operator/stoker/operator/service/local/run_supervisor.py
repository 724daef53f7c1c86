"""Entry point of `python -m stoker.operator.service.local.run_supervisor`, the supervisor of `main`."""

from __future__ import annotations

from stoker.pod.collection import imports
from stoker.pod.command_line import run_program


def main() -> int:
    """Run the supervisor and return its exit code."""
    with imports():
        from stoker.operator.service.local.main import main as supervisor  # takes more than a second
    return supervisor()


if __name__ == "__main__":
    run_program(main, "stoker-supervisor")
