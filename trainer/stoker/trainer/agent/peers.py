"""The state of the other pods, polled from their agents.

Only node 0 polls regularly; a missing answer is no failure by itself.

Owned by the agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from stoker.trainer.agent.run_state import NodeState

TIMEOUT_S = 2.0


async def ask_peers(agents: Sequence[str], own_rank: int) -> dict[int, NodeState]:
    """The state of every node but `own_rank`; `agents` are base URLs by node rank."""
    others = [(rank, url) for rank, url in enumerate(agents) if rank != own_rank]
    async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
        answers = await asyncio.gather(*(_ask(client, rank, url) for rank, url in others))
    return {answer.node_rank: answer for answer in answers}


async def _ask(client: httpx.AsyncClient, rank: int, url: str) -> NodeState:
    try:
        answer = await client.get(f"{url.rstrip('/')}/status")
        answer.raise_for_status()
        return _node(rank, answer.json())
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return NodeState(node_rank=rank, reachable=False)


def _node(rank: int, status: object) -> NodeState:
    """The valid fields of another agent's `/status`; invalid ones become None."""
    facts: Mapping[str, Any] = status if isinstance(status, dict) else {}
    phase, step = facts.get("phase"), facts.get("step")
    return NodeState(
        node_rank=rank,
        reachable=True,
        phase=phase if isinstance(phase, str) else None,
        step=step if isinstance(step, int) else None,
    )
