"""`python die_with_parent.py PARENT COMMAND...` becomes COMMAND, which the kernel kills when process PARENT dies.

It is a program of its own, so that the parent runs no code between fork and exec and COMMAND needs no change. It works
on Linux only; elsewhere a rank still ends when its channel to the agent closes.
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
    if os.getppid() != parent:  # it died before prctl was called
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
