"""Entry point of `python -m stoker.router`, the router of `main`."""

from __future__ import annotations

from stoker.pod.collection import imports
from stoker.pod.command_line import run_program


def main() -> int:
    """Run the router and return its exit code."""
    with imports():
        from stoker.router.main import main as router  # takes half a second
    return router()


if __name__ == "__main__":
    run_program(main, "python -m stoker.router")
