"""Entry point of `python -m stoker.operator`, the operator of `main`."""

from __future__ import annotations

import sys

from stoker.pod.collection import imports


def main() -> int:
    """Run the operator and return its exit code."""
    with imports():
        from stoker.operator.main import main as operator  # takes more than a second
    return operator()


if __name__ == "__main__":
    sys.exit(main())
