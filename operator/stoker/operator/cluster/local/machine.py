"""What this machine has, as a Node names it. The only place that asks the operating system."""

from __future__ import annotations

import os
from collections.abc import Mapping


def machine_capacity() -> Mapping[str, str]:
    """Cores and main memory, as quantities of Kubernetes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": str(os.cpu_count() or 1), "memory": f"{memory // 1024}Ki"}
