"""The stacks of all ranks when one hangs.

A signal makes each rank write its own, also while its Python code is blocked.

Called by the agent when its hang detector fires.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from stoker.trainer.agent.rank_process import RankProcess

WAIT_S = 2.0
POLL_S = 0.05
FRAMES = 4


async def collect_stacks(processes: Sequence[RankProcess]) -> dict[int, str]:
    """The stacks of all threads by rank; empty for a rank that wrote none in time."""
    for process in processes:
        process.signal(signal.SIGUSR1)
    before: dict[int, str] = {}
    for _ in range(round(WAIT_S / POLL_S)):
        await asyncio.sleep(POLL_S)
        now = {process.rank: _read(process) for process in processes}
        if now == before and all(now.values()):
            break
        before = now
    return before


def innermost(stacks: str) -> str:
    """The position of the main thread on one line: its innermost call, then calls of Stoker's code.

    Example: `all_gather (c10d.py:12) < step (loop.py:40)`.
    """
    blocks = [block for block in stacks.split("\n\n") if "File " in block]
    if not blocks:
        return "no stacks"
    main = next(
        (block for block in blocks if "(most recent call first)" in block and "Current thread" in block), blocks[-1]
    )
    calls = [line.strip() for line in main.splitlines() if line.strip().startswith("File ")]
    ours = [call for call in calls[1:] if "/stoker/" in call] or calls[1:]
    return " < ".join(_call(line) for line in [*calls[:1], *ours[: FRAMES - 1]])


def _call(line: str) -> str:
    """`File "/a/b.py", line 12 in wait` as `wait (b.py:12)`."""
    path, _, rest = line.removeprefix("File ").partition(", line ")
    number, _, function = rest.partition(" in ")
    name = path.strip('"').rsplit("/", 1)[-1]
    return f"{function} ({name}:{number})"


def _read(process: RankProcess) -> str:
    try:
        return process.stacks.read_text(errors="replace")
    except OSError:
        return ""
