"""The trainer's agent: see `stoker.trainer.agent.program`."""

from __future__ import annotations

import sys

from stoker.trainer.agent.program import main

if __name__ == "__main__":
    sys.exit(main())
