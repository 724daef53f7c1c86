"""A spec that no version has built so far, for tests of what is refused by name."""

from __future__ import annotations

from typing import Any

UNBUILT: dict[str, Any] = {"runtime": {"kernels": "reference", "attention": "cudnn"}}
"""cuDNN's attention belongs to the fused kernels."""
UNBUILT_FIELD = "spec.runtime.attention cudnn"
"""The message of its refusal begins with this."""
BUILT: dict[str, Any] = {"runtime": {"kernels": None, "attention": None}}
"""The patch that takes it back."""
