"""Ranks that the others wait for, as the leader's agent names them, with their pods and nodes.

The trainer decides which rank is late (`stoker.trainer.rank.stragglers`). Nothing is restarted for it.

Pure. Called by `status`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stoker.operator.api.trainingjob_status import Straggler
from stoker.operator.api.value import measured
from stoker.operator.domain.conditions import Condition
from stoker.operator.domain.labels import NODE_RANK
from stoker.operator.domain.plan import Event
from stoker.operator.domain.pods import label
from stoker.operator.reconcile.trainingjob.view import TrainingView

STRAGGLING = "Straggling"
"""Condition while some ranks are late step after step."""
FOUND = "StragglerFound"


def stragglers(view: TrainingView) -> tuple[Straggler, ...]:
    """The stragglers of the running attempt; none once its leader has ended."""
    found = (view.report or {}).get("stragglers") or ()
    return tuple(_straggler(view, each) for each in found) if view.leader_running else ()


def straggling(found: Iterable[Straggler]) -> Condition:
    """The condition that names them; absent while there are none."""
    text = "; ".join(map(_line, found))
    return Condition(STRAGGLING, True if text else None, "RankLate", text)


def newly_found(before: Iterable[Straggler], found: Iterable[Straggler]) -> tuple[Event, ...]:
    """An Event for the ranks that were not named before."""
    known = {each.rank for each in before}
    new = [each for each in found if each.rank not in known]
    return (Event("Warning", FOUND, "; ".join(map(_line, new))),) if new else ()


def _straggler(view: TrainingView, found: Mapping[str, Any]) -> Straggler:
    rank = str(found["node_rank"])
    pod = next((pod for pod in view.gang if label(pod, NODE_RANK) == rank), None)
    return Straggler(
        rank=found["rank"],
        pod=pod["metadata"]["name"] if pod else None,
        node=pod["spec"].get("nodeName") if pod else None,
        ratio=measured(round(found["busy_s"] / found["typical_s"], 2)) or "1",
    )


def _line(found: Straggler) -> str:
    where = f" on node {found.node}" if found.node else ""
    return f"rank {found.rank}{where} computes {found.ratio} times as long as its peers"
