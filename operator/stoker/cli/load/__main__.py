"""`python -m stoker.cli.load serve URL`: the program behind `stoker bench serve`."""

from __future__ import annotations

import sys

from stoker.cli.load.main import main

if __name__ == "__main__":
    sys.exit(main())
