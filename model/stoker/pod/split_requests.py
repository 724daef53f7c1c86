"""The header by which a router splits a request between two engines. Values only.

The router sends the request to the engine that answers it, with the address of the engine that computes the prompt. The
answering engine owns the request: when the other one fails, it computes the prompt itself.
"""

from __future__ import annotations

PREFILL_HEADER = b"x-stoker-prefill"
"""HOST:PORT at which engines reach the one that computes the prompt. Only a router sets it: routers drop a client's."""
