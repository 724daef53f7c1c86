"""Entry point of `python -m stoker.engine.worker_main`, the rank of `worker_program`."""

from __future__ import annotations

from stoker.pod.collection import imports


def main() -> None:
    """Run the rank."""
    with imports():
        from stoker.engine.worker_program import main as worker  # imports torch, which takes seconds
    worker()


if __name__ == "__main__":
    main()
