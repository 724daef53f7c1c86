"""Assertions of every audit of the cache."""

from __future__ import annotations

from stoker.engine.core.blocks import BlockAudit


def assert_sound(audit: BlockAudit) -> None:
    """Assert that every block is free, cached or owned, exactly once, and that the audit finds no other fault."""
    assert (audit.leaked, audit.faults) == ((), ())
    assert audit.free + audit.cached + audit.owned == audit.total
