"""Entry point of `python -m stoker.operator`, the operator of `main`."""

from __future__ import annotations

from stoker.pod.collection import imports
from stoker.pod.command_line import run_program


def main() -> int:
    """Run the operator and return its exit code."""
    with imports():
        from stoker.operator.main import main as operator  # takes more than a second
    return operator()


if __name__ == "__main__":
    run_program(main, "python -m stoker.operator")
