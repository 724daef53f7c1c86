"""A spec that no version has built so far, for tests of what is refused by name."""

from __future__ import annotations

from typing import Any

UNBUILT: dict[str, Any] = {"memory": {"cpuOffload": True}, "optimization": {"optimizer": "lamb"}}
"""LAMB needs the norms of whole tensors before it changes any of them, and offloaded state is updated in pieces."""
UNBUILT_FIELD = "spec.optimization.optimizer lamb"
"""The message of its refusal begins with this."""
BUILT: dict[str, Any] = {"memory": {"cpuOffload": None}, "optimization": {"optimizer": None}}
"""The patch that takes it back."""
