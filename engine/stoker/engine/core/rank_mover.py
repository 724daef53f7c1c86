"""What one of several ranks does with its part of cache blocks: its ports to other engines, and its slots of the host
tier. Made on each rank when its leader calls for the first time; opens what the leader asks for.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.engine.core.handover.rank_blocks import RankBlocks, open_rank_blocks
from stoker.engine.core.rank_tier import RankTier, open_rank_tier
from stoker.engine.execution.runner import Runner
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.block_calls import (
    BlockCall,
    FenceSave,
    LoadBlocks,
    OpenBlocks,
    OpenFiles,
    OpenLane,
    OpenTier,
    ReadPart,
    RemovePart,
    Report,
    SaveBlocks,
    WritePart,
)


class RankMover:
    """Carries out the leader's calls, in the thread that launches the rank's steps."""

    def __init__(
        self,
        runner: Runner,
        plan: EnginePlan,
        report: Report,
        localised: Callable[[OpenBlocks], OpenBlocks] = lambda call: call,
    ) -> None:
        """`localised`: gives the ports what differs in this rank's pod."""
        self._runner, self._plan, self._report, self._localised = runner, plan, report, localised
        self._ports: RankBlocks | None = None
        self._tier: RankTier | None = None

    def do(self, call: BlockCall) -> None:
        """Carry out a call."""
        match call:
            case OpenBlocks():
                self._ports = open_rank_blocks(self._runner, self._plan, self._localised(call), self._report)
            case OpenTier():
                self._tier = open_rank_tier(self._runner, self._plan, call, self._report)
            case (
                SaveBlocks()
                | LoadBlocks()
                | FenceSave()
                | OpenFiles()
                | WritePart()
                | ReadPart()
                | OpenLane()
                | RemovePart()
            ):
                assert self._tier is not None, "the leader opens it first"
                self._tier.do(call)
            case _:
                assert self._ports is not None, "the leader opens them first"
                self._ports.do(call)

    def close(self) -> None:
        """End what was opened."""
        for opened in (self._ports, self._tier):
            if opened is not None:
                opened.close()
