"""Paths of Unix sockets in deep folders: an address holds 107 bytes, a path may be longer.

Called by both ends of the supervisor's socket: `control_socket` and the command line.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 100


@contextlib.contextmanager
def short_path(socket: Path) -> Iterator[str]:
    """A short path of the same socket, valid inside the `with`.

    Raises:
        ValueError: the path is too long and this system has no /proc/self/fd.
    """
    if len(os.fsencode(socket)) <= MAX_BYTES:
        yield str(socket)
        return
    if not Path("/proc/self/fd").exists():
        raise ValueError(f"{socket}: a socket's path has at most {MAX_BYTES} bytes here; choose a shorter state folder")
    folder = os.open(socket.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{socket.name}"
    finally:
        os.close(folder)
