"""`python -m stoker.cli.load serve URL`: the program behind `stoker bench serve`."""

from __future__ import annotations

from stoker.cli.load.main import main
from stoker.pod.command_line import run_program

if __name__ == "__main__":
    run_program(main, "stoker bench serve")
