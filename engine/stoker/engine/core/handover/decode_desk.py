"""The decode side: gives prompts to prefill engines, takes their blocks and tokens, and goes on alone.

A request is either here (`Split`, open) or in the engine, never in both. It leaves for the engine when all its blocks
are verified and the engine has room (takeover), or for any reason not to wait for its peer (local). Both are the same
act: the engine gets the request behind the tokens that the client has, and finds the verified blocks in its prefix
cache. There is no handshake at the end: what P sends later has a position that was passed, and is dropped.

Owned by `desk`, called by the core's thread.
"""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable

from stoker.engine.core.handover.cache_room import CacheRoom
from stoker.engine.core.handover.contents import BlockSeeds
from stoker.engine.core.handover.decode_side import Split, Stage
from stoker.engine.core.handover.intakes import Intakes
from stoker.engine.core.handover.messages import (
    Beat,
    BlocksReady,
    Cancel,
    Cancelled,
    Commit,
    Credit,
    Failed,
    Part,
    PeerHello,
    PeerRefused,
    Prefill,
    TakeOver,
    Tokens,
)
from stoker.engine.core.handover.office import BEAT_S, GRANT_S, Gone, Office, Reason
from stoker.engine.core.handover.peers import (
    DAMAGED_S,
    MOST_DAMAGED,
    SHUNNED_S,
    UNLINKED_S,
    Peer,
    Peers,
)
from stoker.engine.core.handover.stale_blocks import count_stale
from stoker.engine.core.handover.takeover_watch import TakeoverWatch
from stoker.engine.core.messages import AddRequest, Delta, Outputs, RequestProgress, RequestState
from stoker.engine.core.request import Begun
from stoker.engine.errors import RequestRefused
from stoker.engine.transfer.intake import Announcement, Intake, Taken
from stoker.engine.transfer.landing_zone import Grant, Owner
from stoker.engine.transfer.part_plan import PartPlan
from stoker.engine.transfer.port import LayoutMismatch

log = logging.getLogger("stoker.engine")

LATE_S = 10.0
"""Longest time without a block or a token of a request."""


class DecodeDesk:
    """The requests of this engine whose prompts others compute."""

    def __init__(self, office: Office) -> None:
        self.office = office
        self.engine, self.zone, self.tally = office.engine, office.zone, office.tally
        self.blocks = office.engine.scheduler.blocks
        self.open: dict[str, Split] = {}
        """By the dispatch's id."""
        self.peers = Peers()
        self._by_key: dict[tuple[str, str], Split] = {}
        self.intakes = Intakes(self.zone)
        self._takeovers = TakeoverWatch(self.tally)
        self._room = CacheRoom(self.engine.scheduler)
        self._beat_s = office.clock()
        self._beats = 0

    # Requests of fronts.

    def take(self, front: str, request: AddRequest) -> bool:
        """Give the prompt to the engine that the request names. False: the caller adds it to this engine.

        Raises:
            RequestRefused: this engine would refuse it, too.
        """
        now_s = self.office.clock()
        reason = self._unfit(request) or self.peers.shun_reason(request.prefill, now_s)
        if reason is not None:
            return self._decline(reason)
        if (front, request.request_id) in self._by_key:
            raise RequestRefused("invalid", f"request_id {request.request_id!r} is in use", "request_id")
        self.engine.check_request(request.request_id, request.prompt_tokens, request.params, front=front)
        split, peer = self._begin(front, request, now_s), self.peers.find(request.prefill)
        if peer is not None and peer.hello is not None:
            split.peer_block_size = peer.hello.port.layout.block_size
        if split.num_blocks <= split.first_block:
            reason = "short"
        elif not self._room.takes_more(self.open.values()):
            reason = "full"
        if reason is not None:
            self._forget(split)
            return self._decline(reason)
        if peer is None:
            self.peers.add(split.peer, now_s)
            self.office.post.call(split.peer, self.office.hello)
        elif peer.hello is not None:
            self._reserve(split, peer.hello, peer.plan, now_s)
        return True

    def _unfit(self, request: AddRequest) -> Reason | None:
        params = request.params
        if request.resumed or params.prompt_logprobs is not None or params.seed is None:
            return "unsupported"
        host, _, port = request.prefill.rpartition(":")
        return None if host and port.isdigit() and 0 < int(port) < 65536 else "unreachable"

    def _decline(self, reason: Reason) -> bool:
        self.tally.outcomes["local"] += 1
        self.tally.reasons[reason] += 1
        return False

    def _begin(self, front: str, request: AddRequest, now_s: float) -> Split:
        size = self.blocks.block_size
        split = Split(uuid.uuid4().hex, front, request, request.prefill, size, now_s, 0)
        split.first_block = self.blocks.follow(split, request.prompt_tokens, split.num_blocks, split.salt)
        split.cached_tokens = split.first_block * size
        self.open[split.id] = self._by_key[split.key] = split
        self.tally.changes += 1
        return split

    def _reserve(self, split: Split, hello: PeerHello, plan: PartPlan, now_s: float) -> None:
        """Send the prompt to its peer, with slots."""
        split.peer_block_size = hello.port.layout.block_size
        if split.num_blocks <= split.first_block:
            self._local(split, "short")
            return
        split.stage, split.moved_s = Stage.RESERVED, now_s
        split.owner = Owner(hello.port.peer, split.id)
        request, table = split.request, self.blocks
        seeds = BlockSeeds(hello.port.fingerprint, request.prompt_tokens, split.block_size, split.salt)
        target = lambda index: table.table(split)[index]  # noqa: E731
        copier = self.office.store.copier(plan)
        self.intakes.open(split.id, Intake(self.zone.zone, split.owner, copier, target=target, seed=seeds))
        message = Prefill(
            split.id, request.prompt_tokens, request.params, request.priority, split.first_block,
            self._grant(split, now_s), request.trace, request.place,
        )  # fmt: skip
        self.office.post.call(split.peer, message)

    def _grant(self, split: Split, now_s: float) -> tuple[Grant, ...]:
        """Slots for the blocks that have none, as far as there are free ones."""
        assert split.owner is not None
        with self.zone.lock:
            held = len(self.zone.zone.held(split.owner))
            missing = split.num_blocks - split.first_block - len(split.sound) - held
            return tuple(self.zone.zone.grant(split.owner, missing, now_s, GRANT_S)) if missing > 0 else ()

    def abort(self, front: str, request_id: str) -> list[tuple[str, Delta]]:
        """End a request whose client has gone, and return its last deltas."""
        split = self._by_key.get((front, request_id))
        if split is None:
            return []
        ended = [choice for choice, output in enumerate(split.outputs) if not output.ended]
        self.engine.num_finished["abort"] += len(ended)
        self.tally.outcomes["cancelled"] += 1
        self._part_with(split, "the client has gone")
        split.stage = Stage.ENDED
        facts = split.facts(0, self.office.clock())
        return [(front, Delta(request_id, choice, (), finish_reason="abort", facts=facts)) for choice in ended]

    def finish_choice(self, front: str, request_id: str, choice: int) -> bool:
        """End a choice whose text is complete. False: the request is not here."""
        split = self._by_key.get((front, request_id))
        if split is None:
            return False
        if 0 <= choice < len(split.outputs) and not split.outputs[choice].ended:
            split.finish_choice(choice)
            self.engine.num_finished["stop"] += 1
            self._end_if_done(split)
        return True

    def progress(self, front: str, request_id: str) -> RequestProgress | None:
        split = self._by_key.get((front, request_id))
        if split is None:
            return None
        state: RequestState = "QUEUED" if split.stage is Stage.NEW else "DECODING" if split.begun else "PREFILLING"
        return RequestProgress(request_id, state, split.cached_tokens, 0)

    # Letters of peers.

    def read(self, endpoint: str, message: object) -> None:
        """Take one message of a prefill engine."""
        now_s = self.office.clock()
        peer = self.peers.find(endpoint)
        if peer is None:
            return
        peer.heard_s = now_s
        match message:
            case Gone():
                self._lose(peer, "lost" if peer.hello is not None else "unreachable")
            case PeerHello():
                self._welcome(peer, message, now_s)
            case PeerRefused(field="transport", ours=why):
                self._lose(peer, "transport", UNLINKED_S, why)
            case PeerRefused(field=name, ours=theirs, theirs=ours):
                self._lose(peer, "incompatible", why=f"{name} is {ours} here and {theirs} there")
            case BlocksReady(id=name, blocks=blocks) if name in self.open:
                announced = [Announcement(one.place, Grant(one.slot, one.generation), one.sum) for one in blocks]
                self._fill(self.open[name], announced, now_s)
            case BlocksReady():
                name = peer.hello.port.peer if peer.hello is not None else ""
                count_stale(self.zone, Owner(name, message.id), message.blocks, now_s)
            case Tokens(id=name, parts=parts) if name in self.open:
                self._forward(self.open[name], parts, now_s)
            case Tokens(id=name):
                self.office.post.call(endpoint, Cancel(name, "this request is over"))
            case Commit(id=name) | Cancelled(id=name):
                self._confirm(peer, name)
                if name in self.open:
                    self._local(self.open[name], "refused")
            case Failed(id=name, code=code) if name in self.open:
                self._fail(peer, self.open[name], code)
            case _:
                pass

    def _welcome(self, peer: Peer, hello: PeerHello, now_s: float) -> None:
        try:
            self.office.hello.refuse_other(hello)
        except LayoutMismatch as refused:
            self._lose(peer, "incompatible", why=str(refused))
            return
        if not peer.meet(hello, self.office.hello.layouts):
            self._lose(peer, "incompatible", why="its blocks cannot be repacked for this engine")
            return
        for split in [one for one in self.open.values() if one.peer == peer.endpoint and one.stage is Stage.NEW]:
            self._reserve(split, hello, peer.plan, now_s)

    def _fail(self, peer: Peer, split: Split, code: str) -> None:
        self._local(split, "transport" if code == "transport" else "refused")
        if code == "unknown":  # it was started anew, and does not know this engine
            self._lose(peer, "lost")

    def _confirm(self, peer: Peer, name: str) -> None:
        """The peer writes no slot of this dispatch any more."""
        if peer.hello is not None:
            with self.zone.lock:
                self.zone.zone.confirm(Owner(peer.hello.port.peer, name))

    def _fill(self, split: Split, announced: list[Announcement], now_s: float) -> None:
        """Copy announced blocks into the cache and compare them."""
        announced = [one for one in announced if split.first_block <= one.place < split.num_blocks]
        if not announced:
            return
        size = max(one.place for one in announced) + 1
        if size > len(self.blocks.table(split)) and not self.engine.scheduler.grow_landing(split, size):
            self._local(split, "full")
            return
        self._note_taken(split, self.intakes.take(split.id, announced, now_s), now_s)

    def _note_taken(self, split: Split, taken: Taken, now_s: float) -> None:
        """Use the blocks that are sound, ask for the others, and give slots for more."""
        self.tally.blocks["received"] += len(taken.sound)
        split.note_sound(taken.sound, now_s)
        self.blocks.commit(split, split.request.prompt_tokens, split.num_verified * split.block_size)
        if taken.again or taken.lost:
            peer = self.peers.note_damage(split.peer, len(taken.again) + len(taken.lost), now_s)
            if peer is not None:  # damaged again and again
                self._lose(peer, "damaged", DAMAGED_S, f"{MOST_DAMAGED} damaged blocks within {DAMAGED_S:g} s")
        if not split.stage.open:
            return
        if taken.lost:
            self._local(split, "damaged")
            return
        slots = self._grant(split, now_s)
        if slots or taken.again:
            self.office.post.call(split.peer, Credit(split.id, slots, tuple(taken.again)))

    def _forward(self, split: Split, parts: Iterable[Part], now_s: float) -> None:
        """Send new tokens to the client."""
        deltas = []
        for part in parts:
            try:
                unknown = {choice for choice, output in enumerate(split.outputs) if output.first_s is None}
                if split.accept(part, now_s):
                    deltas.append(self._delta(split, part, first=part.choice in unknown))
            except ValueError:
                self._send(split, deltas)
                self._local(split, "lost")
                return
        self._send(split, deltas)
        self._end_if_done(split)

    def _send(self, split: Split, deltas: list[Delta]) -> None:
        if deltas:
            self.office.front.send(split.front, Outputs(tuple(deltas)))

    def _delta(self, split: Split, part: Part, *, first: bool) -> Delta:
        if part.finish_reason is not None:
            self.engine.num_finished[part.finish_reason] += 1
        facts = split.facts(part.choice, self.office.clock(), part) if first or part.finish_reason is not None else None
        return Delta(
            split.request.request_id, part.choice, part.tokens, part.logprobs, None, part.finish_reason,
            part.stop_token, facts=facts,
        )  # fmt: skip

    # Ends.

    def _end_if_done(self, split: Split) -> None:
        if split.stage.open and split.all_ended:
            self.tally.outcomes["prefill_only"] += 1
            self._part_with(split, "complete")
            split.stage = Stage.ENDED

    def _take_over(self, split: Split) -> None:
        self.office.post.call(split.peer, TakeOver(split.id))
        self._to_engine(split, Stage.TAKEOVER)
        self.tally.outcomes["split"] += 1
        self._takeovers.add(split, self.engine.requests[split.key])

    def _local(self, split: Split, reason: Reason) -> None:
        """Compute here what has not come."""
        self._decline(reason)
        if split.owner is not None and self.peers.find(split.peer) is not None:
            self.office.post.call(split.peer, Cancel(split.id, reason))
        self._to_engine(split, Stage.LOCAL)

    def _to_engine(self, split: Split, stage: Stage) -> None:
        """Give the request to this engine, behind the tokens that the client has."""
        split.stage = stage
        self._revoke(split)
        request = split.request
        firsts = tuple(output.first_s for output in split.outputs)
        held = split.num_verified * split.block_size
        begun = Begun(split.began_s, split.cached_tokens, firsts, held) if split.begun else Begun(None, 0)
        self.engine.add_request(
            request.request_id, request.prompt_tokens, request.params, priority=request.priority,
            place=request.place, arrival_s=request.arrival_s, front=split.front, resumed=split.resumed(), begun=begun,
        )  # fmt: skip
        self._forget(split)

    def _part_with(self, split: Split, why: str) -> None:
        """End the peer's work for a request that needs no more."""
        if split.owner is not None:
            self.office.post.call(split.peer, Cancel(split.id, why))
        self._revoke(split)
        self._forget(split)

    def _revoke(self, split: Split) -> None:
        if split.owner is not None:
            with self.zone.lock:
                self.zone.zone.revoke(split.owner, self.office.clock())

    def _forget(self, split: Split) -> None:
        """Give its blocks back; those that were verified can be found in the cache."""
        self.engine.scheduler.close_landing(split)
        self.intakes.close(split.id)
        del self.open[split.id], self._by_key[split.key]
        self.tally.changes += 1

    def _lose(self, peer: Peer, reason: Reason, shunned_s: float = SHUNNED_S, why: str = "") -> None:
        """Do without a peer: everything that it works on is computed here."""
        if not self.peers.remove(peer, reason, self.office.clock() + shunned_s, why):
            return
        if why:
            log.warning("prefill engine %s is not used for %g s: %s: %s", peer.endpoint, shunned_s, reason, why)
        for split in [one for one in self.open.values() if one.peer == peer.endpoint]:
            self._local(split, reason)
        self.office.post.hang_up(peer.endpoint)

    # Time.

    def turn(self) -> None:
        """Do what time, room and lost connections call for."""
        now_s = self.office.clock()
        self._follow_lost()
        for name, taken in self.intakes.settled(now_s):
            self._note_taken(self.open[name], taken, now_s)
        with self.zone.lock:
            self.zone.zone.expire(now_s)
        self._takeovers.measure()
        for split in list(self.open.values()):
            if split.stage is Stage.VERIFIED and split.complete and self._room.goes_on(split):
                self._take_over(split)
            elif split.stage is not Stage.NEW and now_s - split.moved_s > LATE_S:
                self._local(split, "late")
            elif split.stage in (Stage.RESERVED, Stage.FILLING) and (slots := self._grant(split, now_s)):
                self.office.post.call(split.peer, Credit(split.id, slots))
        self._beat(now_s)

    def _follow_lost(self) -> None:
        lost = set(self.office.port.lost_peers())
        for peer in [one for one in self.peers if one.hello is not None and one.hello.port.peer in lost]:
            self._lose(peer, "lost")

    def _beat(self, now_s: float) -> None:
        """Give and expect signs of life, and extend the grants of the peers that give them."""
        for peer, reason in self.peers.overdue(now_s):
            self._lose(peer, reason)
        if now_s - self._beat_s < BEAT_S:
            return
        self._beat_s, self._beats = now_s, self._beats + 1
        by_peer: dict[str, list[Split]] = defaultdict(list)
        for split in self.open.values():
            by_peer[split.peer].append(split)
        for peer in self.peers:
            if peer.hello is not None:
                self.office.post.call(peer.endpoint, Beat(self._beats, tuple(one.id for one in by_peer[peer.endpoint])))
        recent = [peer.endpoint for peer in self.peers if now_s - peer.heard_s < 2 * BEAT_S]
        with self.zone.lock:
            for split in (split for endpoint in recent for split in by_peer[endpoint]):
                if split.owner is not None:
                    self.zone.zone.renew(split.owner, now_s)

    def abort_all(self) -> list[tuple[str, Delta]]:
        """End every request here and return the last deltas."""
        return [delta for split in list(self.open.values()) for delta in self.abort(split.front, split.key[1])]

    def drop(self, front: str) -> list[tuple[str, Delta]]:
        """End the requests of a front that is silent."""
        gone = [split.key[1] for split in self.open.values() if split.front == front]
        return [delta for name in gone for delta in self.abort(front, name)]
