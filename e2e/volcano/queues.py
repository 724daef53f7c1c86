"""Queues that are open. Volcano's controllers write that into their status; here only its scheduler runs."""

from __future__ import annotations

from e2e.api.plane import Plane


def open_queue(plane: Plane, name: str) -> None:
    """Open a queue, once it is there: jobs of a queue that is not open never start."""
    plane.kubectl("wait", "--for=create", f"queue/{name}", "--timeout=60s", timeout_s=90)
    opened = '{"status": {"state": "Open"}}'
    plane.kubectl("patch", "queue", name, "--subresource=status", "--type=merge", "-p", opened)
