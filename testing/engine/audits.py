"""What every audit of the cache must find."""

from __future__ import annotations

from stoker.engine.core.blocks import BlockAudit


def assert_sound(audit: BlockAudit) -> None:
    """Every block is free, cached or owned, exactly once, and nothing else is wrong."""
    assert (audit.leaked, audit.faults) == ((), ())
    assert audit.free + audit.cached + audit.owned == audit.total
