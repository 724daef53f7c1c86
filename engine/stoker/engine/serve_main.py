"""`python -m stoker.engine.serve_main`: `stoker serve` as a process. Ctrl-C while it is still importing is no error."""

from __future__ import annotations

import sys


def main() -> int:
    """The exit code: 130 when it was interrupted before it began."""
    try:
        from stoker.engine.serve import main as serve  # takes a second or two
    except KeyboardInterrupt:
        return 130
    return serve()


if __name__ == "__main__":
    sys.exit(main())
