"""Entry point of `python -m stoker.gateway`, the gateway of `main`."""

from __future__ import annotations

import sys

from stoker.pod.collection import imports


def main() -> int:
    """Run the gateway and return its exit code."""
    with imports():
        from stoker.gateway.main import main as gateway  # takes a second
    return gateway()


if __name__ == "__main__":
    sys.exit(main())
