"""Entry point of `python -m stoker.operator.service.local.run_supervisor`, the supervisor of `main`."""

from __future__ import annotations

import sys

from stoker.pod.collection import imports


def main() -> int:
    """Run the supervisor and return its exit code."""
    with imports():
        from stoker.operator.service.local.main import main as supervisor  # takes more than a second
    return supervisor()


if __name__ == "__main__":
    sys.exit(main())
