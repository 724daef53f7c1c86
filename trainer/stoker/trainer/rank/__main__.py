"""Entry point of `python -m stoker.trainer.rank`, the rank of `main`."""

from __future__ import annotations

from typing import NoReturn

from stoker.pod.collection import imports


def main() -> NoReturn:
    """Run the rank and end with its exit code."""
    with imports():
        from stoker.trainer.rank.main import leave  # imports torch, which takes seconds
        from stoker.trainer.rank.main import main as rank
    leave(rank())


if __name__ == "__main__":
    main()
