"""Entry point of `python -m stoker.router`, the router of `main`."""

from __future__ import annotations

import sys

from stoker.pod.collection import imports


def main() -> int:
    """Run the router and return its exit code."""
    with imports():
        from stoker.router.main import main as router  # takes half a second
    return router()


if __name__ == "__main__":
    sys.exit(main())
