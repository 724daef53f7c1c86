"""The trainer's agent: see `stoker.trainer.agent.program`. Ctrl-C while it is still importing is no error."""

from __future__ import annotations

from stoker.pod.collection import imports
from stoker.pod.command_line import run_program


def main() -> int:
    """The exit code: 130 when it was interrupted before it began."""
    try:
        with imports():
            from stoker.trainer.agent.program import main as agent  # takes a second or two
    except KeyboardInterrupt:
        return 130
    return agent()


if __name__ == "__main__":
    run_program(main, "python -m stoker.trainer")
