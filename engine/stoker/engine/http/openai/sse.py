"""Server-sent events as OpenAI's clients read them: `data: {json}`, a blank line, and `data: [DONE]` at the end.

Pure; called by `reply` and `server`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"


def event(content: Mapping[str, Any]) -> bytes:
    """One event. `ensure_ascii` keeps U+2028 and its like from being taken for line ends."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
