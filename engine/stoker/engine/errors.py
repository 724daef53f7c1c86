"""Exceptions of the engine.

EngineError(ValueError)
  RequestRefused        a request cannot be accepted; `.kind` is the reason, `.field` the parameter
  ProtocolError         a message between front and core that this version does not understand
EngineClosed(RuntimeError)      an engine in a script is used after it was closed
ExecutorLost(RuntimeError)      the device or a worker is gone: no request can be served any more
BlockAuditFailed(RuntimeError)  two sequences may hold one cache block: answers may be wrong
"""

from __future__ import annotations

from typing import Literal

RefusalKind = Literal["invalid", "too_long", "queue_full", "draining", "not_ready"]


class EngineError(ValueError):
    """Base of everything a caller can correct."""


class RequestRefused(EngineError):
    """A request that is not taken. The message names the field, the value and what is allowed.

    `kind`: `invalid` and `too_long` are the caller's to correct (400); `queue_full` (429), `draining` and `not_ready`
    (503) may be tried again. `field` is the parameter at fault, where there is one.
    """

    def __init__(self, kind: RefusalKind, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.kind: RefusalKind = kind
        self.field = field


class ProtocolError(EngineError):
    """A frame that is not a message of this protocol version."""


class EngineClosed(RuntimeError):
    """An `LLM` was closed; another one can be made."""


class ExecutorLost(RuntimeError):
    """A worker died or the device failed; the core cannot go on."""


class BlockAuditFailed(RuntimeError):
    """An audit of the cache found what cannot be repaired; the core cannot go on."""
