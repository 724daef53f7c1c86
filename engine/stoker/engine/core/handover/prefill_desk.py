"""The prefill side: computes prompts for other engines, sends their blocks as they are done, and decodes on until the
owner takes over.

To this engine a helped request is one of a front (`front_of`), so it is queued, preempted and refused like any other.
Its finished blocks are found in the prefix cache, and held there until they are sent.

Owned by `desk`, called by the core's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from stoker.engine.core.handover.contents import BlockSeeds
from stoker.engine.core.handover.messages import (
    Beat,
    BlocksReady,
    Cancel,
    Cancelled,
    Commit,
    Credit,
    Failed,
    FailureCode,
    PeerHello,
    PeerRefused,
    Prefill,
    TakeOver,
    Tokens,
)
from stoker.engine.core.handover.office import SILENT_S, Gone, Office
from stoker.engine.core.handover.pieces import pieces
from stoker.engine.core.handover.prefill_side import Help, HelpStage, Writing
from stoker.engine.core.messages import AddRequest, Delta
from stoker.engine.core.request_spans import prompt_spans
from stoker.engine.transfer.landing_zone import Grant
from stoker.engine.transfer.part_plan import PartPlan, plan_parts
from stoker.engine.transfer.port import LayoutMismatch, Link, Move
from stoker.engine.transfer.ticket import Ticket, TransferError

log = logging.getLogger("stoker.engine")

FRONT = "peer "
"""Begins the name of a front that is an engine. Other fronts have hexadecimal names."""


def front_of(caller: str) -> str:
    return FRONT + caller


@dataclass(eq=False)
class Caller:
    """A decode engine that has introduced itself."""

    name: str
    hello: PeerHello
    plan: PartPlan
    link: Future[Link]
    heard_s: float
    helps: dict[str, Help] = field(default_factory=dict)
    closing: list[Help] = field(default_factory=list)
    """Ended ones whose writes are still under way."""
    before: list[str] = field(default_factory=list)
    """Names under which the same engine called earlier; dropped once this link is open."""


class PrefillDesk:
    """The prompts that this engine computes for others."""

    def __init__(self, office: Office) -> None:
        self.office = office
        self.tally = office.tally
        self.blocks = office.engine.scheduler.blocks
        self.callers: dict[str, Caller] = {}
        self._seeds: dict[Help, BlockSeeds] = {}

    @property
    def num_open(self) -> int:
        return sum(len(caller.helps) for caller in self.callers.values())

    def waiting_prompts(self) -> list[int]:
        """Tokens of the prompts that have no first token yet."""
        stages = (HelpStage.QUEUED, HelpStage.PREFILLING)
        helps = (one for caller in self.callers.values() for one in caller.helps.values())
        return [len(one.prefill.prompt) for one in helps if one.stage in stages]

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way whose end is to be noticed soon."""
        return any(one.writing for caller in self.callers.values() for one in (*caller.helps.values(), *caller.closing))

    # Letters of decode engines.

    def read(self, name: str, message: object) -> None:
        """Take one message of a decode engine."""
        if isinstance(message, PeerHello):
            self._greet(name, message)
            return
        caller = self.callers.get(name)
        if caller is None:
            self._refuse_stranger(name, message)
            return
        self._hear(caller)
        match message:
            case Prefill():
                self._begin(caller, message)
            case Credit(id=dispatch, slots=slots, again=again) if dispatch in caller.helps:
                caller.helps[dispatch].slots.extend(slots)
                caller.helps[dispatch].again.extend(again)
                self._push(caller, caller.helps[dispatch])
            case TakeOver(id=dispatch):
                self._end(caller, dispatch, HelpStage.HANDED)
            case Cancel(id=dispatch):
                self._end(caller, dispatch, HelpStage.CANCELLED)
            case Beat(seq=seq, open=wanted):
                self.office.post.answer(name, Beat(seq))
                for dispatch in [one for one in caller.helps if one not in wanted]:
                    self._end(caller, dispatch, HelpStage.CANCELLED)
            case Gone():
                self._drop(caller)
            case _:
                pass

    def _hear(self, caller: Caller) -> None:
        """Note a sign of life, also of the same engine's earlier calls: their links end only when the new one is open,
        else the end looks like this engine's."""
        caller.heard_s = self.office.clock()
        for name in caller.before:
            if name in self.callers:
                self.callers[name].heard_s = caller.heard_s

    def _greet(self, name: str, hello: PeerHello) -> None:
        """Compare the two engines; open the link in a thread."""
        try:
            self.office.hello.refuse_other(hello)
            plan = plan_parts(self.office.hello.layouts, hello.layouts)
        except LayoutMismatch as refused:
            self.office.post.answer(name, PeerRefused(refused.field, str(refused.ours), str(refused.theirs)))
            return
        if name in self.callers:
            self._drop(self.callers[name])
        before = [one.name for one in self.callers.values() if one.hello.port.peer == hello.port.peer]
        link = self.office.port.connect(hello.ports, plan)
        self.callers[name] = Caller(name, hello, plan, link, self.office.clock(), before=before)
        self._hear(self.callers[name])
        self.office.post.answer(name, self.office.hello)

    def _refuse_stranger(self, name: str, message: object) -> None:
        """Answer an engine that this one does not know, such as after a new start."""
        match message:
            case Prefill(id=dispatch) | Credit(id=dispatch):
                self.office.post.answer(name, Failed(dispatch, "unknown", "introduce yourself first"))
            case TakeOver(id=dispatch) | Cancel(id=dispatch):
                self.office.post.answer(name, Cancelled(dispatch))

    def _begin(self, caller: Caller, prefill: Prefill) -> None:
        if prefill.id in caller.helps:
            return  # repeated
        size = caller.hello.port.layout.block_size
        one = Help(caller.name, prefill, size, self.blocks.block_size)
        caller.helps[prefill.id] = one
        self.tally.changes += 1
        self.tally.load.arrived += 1
        self._seeds[one] = BlockSeeds(self.office.hello.port.fingerprint, prefill.prompt, size, one.salt)
        request = AddRequest(
            prefill.id, prefill.prompt, prefill.params, self.office.clock(), prefill.priority, place=prefill.place
        )
        self.office.front.add(front_of(caller.name), request)

    # The engine's answers.

    def deltas(self, front: str, deltas: Sequence[Delta]) -> None:
        """Take output of helped requests, and send it on."""
        caller = self.callers.get(front.removeprefix(FRONT))
        by_help: dict[str, list[Delta]] = {}
        for delta in deltas:
            if caller is not None and delta.request_id in caller.helps:
                by_help.setdefault(delta.request_id, []).append(delta)
        for dispatch, own in by_help.items():
            assert caller is not None
            self._send_on(caller, caller.helps[dispatch], own)

    def _send_on(self, caller: Caller, one: Help, deltas: list[Delta]) -> None:
        given_up = next((delta for delta in deltas if delta.finish_reason in ("abort", "error")), None)
        if given_up is not None:
            self.office.front.withdraw(front_of(caller.name), one.id)
            self._fail(caller, one, "aborted", given_up.error or "the engine is going down")
            return
        if one.stage is not HelpStage.STREAMING and deltas[0].facts is not None:
            one.facts = deltas[0].facts
            self.tally.prefilled(one.facts)
            prompt_spans(self.office.tracer, one.prefill.trace, one.facts)
            self.tally.changes += 1
        parts = one.parts_of(deltas)
        if one.unfinished:  # the client waits for the tokens
            self.office.post.answer(caller.name, Tokens(one.id, parts))
            self._push(caller, one)
        else:  # the owner ends with the last of them
            self._push(caller, one)
            self.office.post.answer(caller.name, Tokens(one.id, parts))

    def refused(self, front: str, dispatch: str, message: str) -> None:
        """The engine did not take a helped request."""
        caller = self.callers.get(front.removeprefix(FRONT))
        if caller is not None and dispatch in caller.helps:
            self._fail(caller, caller.helps[dispatch], "refused", message)

    # Blocks.

    def _push(self, caller: Caller, one: Help) -> None:
        """Send what is computed and has slots."""
        if not caller.link.done() or caller.link.exception() is not None:
            return
        computed = one.blocks_in(self.blocks.follow(one, one.prefill.prompt, one.num_own, one.salt))
        taken = [(index, grant) for index, grant in one.take_slots(computed) if index < computed]
        if not taken:
            return
        sources = self._sources(caller, one, taken)
        tickets: list[tuple[Ticket, int, tuple[tuple[int, Grant], ...]]] = []
        for places in pieces(len(taken), caller.hello.block_bytes, ends=one.all_begun):
            piece = tuple(taken[places])
            moves = list(moves_of(sources[places], [grant for _, grant in piece]))
            tickets.append((caller.link.result().write(moves, one.id.encode()), places.start, piece))
        sums = self.office.store.sums(sources, caller.plan)  # while the copies run
        one.writing += [Writing(ticket, sums, first, piece) for ticket, first, piece in tickets]
        self.tally.blocks["sent"] += len(taken)
        self._announce(caller, one)

    def _sources(self, caller: Caller, one: Help, taken: Sequence[tuple[int, Grant]]) -> list[list[int]]:
        """The runs of this engine's blocks that each block of the peer is made of."""
        table = self.blocks.table(one)
        return [caller.plan.runs(index, table) for index, _ in taken]

    def _announce(self, caller: Caller, one: Help) -> None:
        """Announce the blocks whose writes have ended."""
        while one.writing and one.writing[0].ended:
            writing = one.writing.pop(0)
            error = writing.ticket.error()
            if one.id not in caller.helps:
                continue  # it has ended
            if error is not None:
                self._fail(caller, one, "transport", str(error))
                return
            self.office.post.answer(caller.name, BlocksReady(one.id, writing.announcement(self._seeds[one])))

    # Ends.

    def _end(self, caller: Caller, dispatch: str, stage: HelpStage) -> None:
        """Stop for a `TakeOver` or a `Cancel`; the answer says that no slot is written any more."""
        one = caller.helps.get(dispatch)
        if one is None:
            if all(ended.id != dispatch for ended in caller.closing):  # else its writes are still under way
                self.office.post.answer(caller.name, Cancelled(dispatch))
            return
        self.office.front.withdraw(front_of(caller.name), dispatch)
        if stage is HelpStage.CANCELLED and not one.unfinished:
            stage = HelpStage.FINISHED
        self._close(caller, one, stage)

    def _fail(self, caller: Caller, one: Help, code: FailureCode, message: str) -> None:
        self.office.front.withdraw(front_of(caller.name), one.id)
        one.stage = HelpStage.FAILED
        self.tally.helps["refused" if code == "refused" else "failed"] += 1
        del caller.helps[one.id]
        self.tally.changes += 1
        caller.closing.append(one)
        self.office.post.answer(caller.name, Failed(one.id, code, message))

    def _close(self, caller: Caller, one: Help, stage: HelpStage) -> None:
        one.stage = stage
        self.tally.helps[stage.value] += 1
        del caller.helps[one.id]
        self.tally.changes += 1
        caller.closing.append(one)
        self._free_ended(caller)

    def _free_ended(self, caller: Caller) -> None:
        """Let go of the blocks of ended helps whose writes are over."""
        for one in list(caller.closing):
            self._announce(caller, one)
            if one.writing:
                continue
            caller.closing.remove(one)
            self._release(one)
            end = Commit(one.id) if one.stage is HelpStage.HANDED else Cancelled(one.id)
            self.office.post.answer(caller.name, end)

    def _release(self, one: Help) -> None:
        """Count an ended help, with the tokens that were decoded here, and give its blocks back."""
        if one.facts is not None:
            self.tally.load.finished(replace(one.facts, output_tokens=max(one.counts)))
        self._seeds.pop(one, None)
        if self.blocks.owns(one):
            self.blocks.release(one)

    def _drop(self, caller: Caller) -> None:
        """The decode engine is gone: nothing is written to it any more, and nothing computed."""
        self.callers.pop(caller.name, None)
        for one in list(caller.helps.values()):
            self.office.front.withdraw(front_of(caller.name), one.id)
            self.tally.helps["cancelled"] += 1
        caller.link.add_done_callback(_close)  # waits for the write under way
        for one in (*caller.helps.values(), *caller.closing):
            self._release(one)

    # Time.

    def turn(self) -> None:
        """Send what was computed since the last turn, and follow links and silence."""
        now_s = self.office.clock()
        for caller in list(self.callers.values()):
            if now_s - caller.heard_s > SILENT_S:
                self._drop(caller)
                continue
            if caller.link.done():
                self._follow_link(caller)
            if caller.name in self.callers:
                self._free_ended(caller)

    def _follow_link(self, caller: Caller) -> None:
        error = caller.link.exception()
        lost = None if error is not None else caller.link.result().lost
        for name in caller.before:
            if name in self.callers:
                self._drop(self.callers[name])
        caller.before.clear()
        if error is not None:
            self._give_up(caller, error)
            return
        if lost is not None:
            self._drop(caller)
            return
        for one in list(caller.helps.values()):
            self._announce(caller, one)
            if one.id in caller.helps:
                self._push(caller, one)

    def _give_up(self, caller: Caller, error: BaseException) -> None:
        """No link can be opened: the decode engine goes on without this one, and calls anew after a while."""
        for one in list(caller.helps.values()):
            self._fail(caller, one, "transport", str(error))
        if not isinstance(error, TransferError):
            raise error
        log.warning("no link to %s: %s", caller.hello.port.peer, error)
        self.office.post.answer(caller.name, PeerRefused("transport", str(error), ""))
        self._drop(caller)

    def close(self) -> None:
        for caller in list(self.callers.values()):
            self._drop(caller)


def moves_of(sources: Sequence[Sequence[int]], grants: Sequence[Grant]) -> Iterator[Move]:
    """The moves of runs that fill slots."""
    for runs, grant in zip(sources, grants, strict=True):
        for number, run in enumerate(runs):
            yield Move(run, grant.slot * len(runs) + number, grant.generation)


def _close(link: Future[Link]) -> None:
    if not link.cancelled() and link.exception() is None:
        link.result().close()
