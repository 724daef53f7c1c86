"""The agent: starts a pod's ranks, serves their status, detects hangs, and returns the termination message.

It imports no torch and computes nothing, so it answers while every rank is busy. No process that it starts outlives it.

Made and run by `program`; its state is `RunState`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.pod.causes import ORDERLY_ENDS, Cause
from stoker.pod.gpu_metrics import gpu_metrics
from stoker.pod.termination_message import TerminationMessage
from stoker.trainer.agent.console import Console
from stoker.trainer.agent.control import Control
from stoker.trainer.agent.outcome import RankEnd, RunOutcome, diagnose, read_oom_kills
from stoker.trainer.agent.peers import ask_peers
from stoker.trainer.agent.pod_rank import PodRank, open_rendezvous, rank_environment
from stoker.trainer.agent.rank_process import RankProcess
from stoker.trainer.agent.routes import agent_routes
from stoker.trainer.agent.run_state import RunState
from stoker.trainer.agent.server import AgentServer
from stoker.trainer.agent.stacks import collect_stacks, innermost
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.hang import Hang, find_hang
from stoker.trainer.protocol.messages import Event, SaveCommand, StopCommand, StopMode
from stoker.trainer.protocol.step_signals import STOP_MODES

SETTLE_S = 1.0
"""After a rank failed without a root cause: time for the other ranks to report theirs."""
PEER_POLL_S = 2.0
MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")


@dataclass
class Stop:
    """A requested end of the run."""

    mode: StopMode
    why: str
    at: float
    """The time, on the agent's clock, at which the ranks are killed."""
    nothing_to_save: bool
    """No step was finished when the request came."""


class Agent:
    """One pod's part of a run.

    `rank_command` starts a rank. The agent adds `--channel-fd N --stacks FILE`, and `--master-listen-fd N` for global
    rank 0.
    """

    def __init__(
        self,
        config: TrainerConfig,
        pod: PodRank,
        *,
        rank_command: Sequence[str],
        environment: Mapping[str, str],
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.pod = config, pod
        self.state = RunState(config.job, pod, started_at=clock())
        self._command, self._environment = rank_command, environment
        self._console, self._clock = console, clock
        self._processes: list[RankProcess] = []
        self._ended: list[RankProcess] = []
        self._stop: Stop | None = None
        self._server = self._new_server()

    @property
    def port(self) -> int:
        """The HTTP port; known after the server has started."""
        return self._server.port

    async def run(self) -> TerminationMessage:
        """Run this pod's ranks to their end and return the termination message. No rank's process is left.

        Raises:
            ConfigError: an address cannot be bound, or the pod has fewer GPUs than ranks.
        """
        oom_kills = _count_oom_kills()
        background: list[asyncio.Task[Any]] = []
        try:
            await self._server.start()
            await self._start_ranks()
            if self.pod.node_rank == 0 and len(self.config.gang.agents) > 1:
                background.append(asyncio.create_task(self._watch_peers()))
            outcome = await _first(self._watch_ranks(oom_kills), self._watch_progress(), self._watch_stop())
        finally:
            await self._end_ranks()
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self._server.close()
        return self._termination_message(outcome)

    def stop(self, mode: StopMode, deadline_s: float, why: str) -> None:
        """Make all ranks save and exit within `deadline_s`.

        A second call can only shorten the time, or turn the stop into a cancel.
        """
        nothing = self._nothing_to_save()
        at = self._clock() + (0 if nothing else deadline_s)
        if self._stop is not None:
            mode = max(mode, self._stop.mode, key=STOP_MODES.index)
            at = min(at, self._stop.at)
            nothing = self._stop.nothing_to_save
        self._stop = Stop(mode=mode, why=why, at=at, nothing_to_save=nothing)
        self.state.stopping = why
        for process in self._processes:
            process.send(StopCommand(mode=mode))

    def interrupt(self, why: str) -> None:
        """Handle SIGTERM or Ctrl-C: the first one saves within the grace period, the next one ends at once."""
        grace = self.config.grace_period_s
        margin = min(3.0, 0.1 * grace)  # the termination message must be written before SIGKILL
        again = self._stop is not None
        self._console.line(
            f"{why}: " + ("ending now" if again else f"saving first, within {grace:g} s; once more ends at once")
        )
        self.stop("interrupt", 0 if again else grace - margin, why)

    # --- watches, one coroutine each, while ranks run ---

    async def _watch_ranks(self, oom_kills: int) -> RunOutcome:
        """Wait until all ranks have ended, or one has failed."""
        waiting = {asyncio.create_task(process.ended.wait()): process for process in self._processes}
        try:
            while len(self._ended) < len(self._processes):
                done, _ = await asyncio.wait(waiting.keys() - self._ended_tasks(waiting), return_when="FIRST_COMPLETED")
                self._ended += [waiting[task] for task in done]
                outcome = self._diagnose(oom_kills)
                if outcome.cause in (Cause.RANK_FAILED, Cause.PEER_LOST):
                    await asyncio.wait(waiting, timeout=SETTLE_S)
                    self._ended += [
                        process for process in self._processes if process.ended.is_set() and process not in self._ended
                    ]
                    return self._diagnose(oom_kills)
                if outcome.cause not in ORDERLY_ENDS:
                    return outcome
            return self._diagnose(oom_kills)
        finally:
            for task in waiting:
                task.cancel()

    async def _watch_progress(self) -> RunOutcome:
        """Wait until a rank makes no progress for longer than its phase allows."""
        deadlines = self.config.deadlines
        shortest = min(
            deadlines.load_s, deadlines.first_step_s, deadlines.step_s, deadlines.save_s, deadlines.validation_s
        )
        tick_s = min(1.0, shortest / 10)
        while True:
            await asyncio.sleep(tick_s)
            running = {process.rank: process.returncode is None for process in self._processes}
            hang = find_hang(self.state.heartbeats(running), deadlines, self._clock())
            if hang is not None:
                return await self._report_hang(hang)

    async def _watch_stop(self) -> RunOutcome:
        """Wait until the time for a requested stop is over."""
        while self._stop is None or self._clock() < self._stop.at:  # noqa: ASYNC110  (the time may be moved forward)
            await asyncio.sleep(0.05)
        cause = Cause.CANCELLED if self._stop.mode == "cancel" else Cause.INTERRUPTED
        return RunOutcome(cause, None, self.state.step, f"{self._stop.why}: {self._left()} (phase {self.state.phase})")

    def _left(self) -> str:
        """What a stop whose time is over has left undone."""
        if self._stop is not None and self._stop.nothing_to_save:
            return "nothing new to save"
        saved = any(save.verified and save.step == self.state.step for save in self.state.saves.values())
        return f"no time was left for {'more than the last save' if saved else 'a last save'}"

    async def _watch_peers(self) -> None:
        while True:
            self.state.peers = await ask_peers(self.config.gang.agents, self.pod.node_rank)
            await asyncio.sleep(PEER_POLL_S)

    async def _report_hang(self, hang: Hang) -> RunOutcome:
        """Log all stacks; a hang because another pod is gone is reported as PeerLost."""
        stacks = await collect_stacks([process for process in self._processes if process.returncode is None])
        for rank, text in stacks.items():
            self._console.line(f"stacks of rank {rank}:\n{text or '(none)'}")
        detail = (
            f"rank {hang.rank} made no progress in phase {hang.phase} for {hang.silent_s:.0f} s "
            f"({hang.allowed_s:.0f} allowed)"
        )
        lost = await self._lost_peers()
        if lost:
            return RunOutcome(
                Cause.PEER_LOST,
                hang.rank,
                self.state.step,
                f"{detail}; no answer from node {', '.join(map(str, lost))}",
            )
        places = "; ".join(f"rank {rank}: {innermost(text)}" for rank, text in stacks.items())
        return RunOutcome(Cause.HANG, hang.rank, self.state.step, f"{detail}; {places}")

    async def _lost_peers(self) -> list[int]:
        peers = await ask_peers(self.config.gang.agents, self.pod.node_rank)
        return [rank for rank, node in peers.items() if not node.reachable or node.phase == "Exited"]

    # --- ranks ---

    async def _start_ranks(self) -> None:
        rendezvous = open_rendezvous(self.config, self.pod)
        with rendezvous or contextlib.nullcontext():
            pod = self.pod if rendezvous is None else replace(self.pod, master_port=rendezvous.getsockname()[1])
            for local_rank, rank in enumerate(pod.ranks):
                environment = rank_environment(self.config, pod, local_rank, self._environment)
                stacks = Path(self.config.work_dir) / "stacks" / f"rank-{rank:05}.txt"
                process = RankProcess(rank, stacks, self._on_event, self._console.rank_line)
                self._processes.append(process)
                if rank == 0 and rendezvous is not None:
                    fd = rendezvous.fileno()
                    await process.start([*self._command, "--master-listen-fd", str(fd)], environment, (fd,))
                else:
                    await process.start(self._command, environment)

    async def _end_ranks(self) -> None:
        for process in self._processes:
            process.kill()
        await asyncio.gather(*(process.ended.wait() for process in self._processes if process.started))

    def _on_event(self, rank: int, event: Event) -> None:
        self.state.apply(rank, event, clock=self._clock(), unix=time.time())
        if rank == self.pod.first_rank:
            self._console.show(event)

    def _ended_tasks(self, waiting: Mapping[asyncio.Task[Any], RankProcess]) -> set[asyncio.Task[Any]]:
        return {task for task, process in waiting.items() if process in self._ended}

    def _diagnose(self, oom_kills: int) -> RunOutcome:
        ends = [
            RankEnd(process.rank, process.returncode or 0, self.state.ranks[process.rank].end, process.last_lines)
            for process in self._ended
        ]
        return diagnose(ends, oom_kills=_count_oom_kills() - oom_kills, nodes=self.pod.nodes)

    def _nothing_to_save(self) -> bool:
        return not self.state.has_stepped and self.state.phase == "Loading"

    # --- HTTP server and termination message ---

    def _new_server(self) -> AgentServer:
        control = Control(self.state, self._save, self.stop)
        gpus = gpu_metrics(self._environment)
        return AgentServer(self.config.listen, *agent_routes(self.config, self.state, control, self._clock, gpus))

    def _save(self, command: SaveCommand) -> bool:
        return bool(self._processes) and self._processes[0].send(command)

    def _termination_message(self, outcome: RunOutcome) -> TerminationMessage:
        self.state.cause = outcome.cause
        unread = False if outcome.cause in ORDERLY_ENDS else None
        last_step = self.state.step if self.state.step is not None else outcome.step
        return TerminationMessage(
            cause=outcome.cause,
            step=last_step if outcome.cause in ORDERLY_ENDS or outcome.step is None else outcome.step,
            rank=outcome.rank,
            detail=outcome.detail,
            saves=self.state.save_records(unread=unread),
            saves_omitted=self.state.saves_omitted,
            result=self.state.last_numbers(),
        )


async def _first(*watches: Coroutine[Any, Any, RunOutcome]) -> RunOutcome:
    """The outcome of the watch that ends first. Cancels the others."""
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        done, _ = await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _count_oom_kills() -> int:
    return read_oom_kills(MEMORY_EVENTS.read_text()) if MEMORY_EVENTS.is_file() else 0
