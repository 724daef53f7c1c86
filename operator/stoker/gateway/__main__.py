"""Entry point of `python -m stoker.gateway`, the gateway of `main`."""

from __future__ import annotations

from stoker.pod.collection import imports
from stoker.pod.command_line import run_program


def main() -> int:
    """Run the gateway and return its exit code."""
    with imports():
        from stoker.gateway.main import main as gateway  # takes a second
    return gateway()


if __name__ == "__main__":
    run_program(main, "python -m stoker.gateway")
