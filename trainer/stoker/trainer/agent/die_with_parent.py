"""Started as a program, `python leash.py PARENT COMMAND...`: becomes COMMAND, which the kernel kills when process PARENT dies.

A program of its own, so that the parent runs no code between fork and exec and the command needs to know nothing. Only Linux has this
leash; elsewhere a rank still ends when its channel closes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the leash was tied
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
