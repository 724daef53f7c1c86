"""Both sides of one core: letters in, what the engine gave, and what time calls for.

Owned by `core`, called by its thread between two steps. Without `transfer.listen` there is no desk, and a step costs
what it costs without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from stoker.engine.core.deltas import Addressed
from stoker.engine.core.handover.decode_desk import DecodeDesk
from stoker.engine.core.handover.joined_letters import joined
from stoker.engine.core.handover.office import Office
from stoker.engine.core.handover.prefill_desk import FRONT, PrefillDesk
from stoker.engine.core.messages import AddRequest, CoreMessage, Outputs, Refused, RequestProgress
from stoker.engine.core.stats import TransferStats

CALLER = "@"
"""Begins the name of an engine that has called this one; others are named by the endpoint that was called."""


class Desk:
    """The hand-over of requests between this engine and others."""

    def __init__(self, office: Office, *, endpoint: str = "", unmet: str = "") -> None:
        """`endpoint`: where others call; `unmet`: why `transfer.require` is not met."""
        self.office, self.endpoint, self.unmet = office, endpoint, unmet
        self.decode = DecodeDesk(office)
        self.prefill = PrefillDesk(office)

    @property
    def num_open(self) -> int:
        """Requests that wait for a peer. What is computed for others is in the engine."""
        return len(self.decode.open)

    @property
    def busy(self) -> bool:
        """Whether something is to be noticed soon that sends no message."""
        return self.prefill.busy or self.decode.intakes.busy

    def turn(self) -> None:
        """Read letters, then act on time."""
        for letter in joined(self.office.post.letters()):
            if letter.peer.startswith(CALLER):
                self.prefill.read(letter.peer, letter.message)
            else:
                self.decode.read(letter.peer, letter.message)
        self.prefill.turn()
        self.decode.turn()

    # For the core.

    def take(self, front: str, request: AddRequest) -> bool:
        """Give the prompt to the engine that the request names. False: compute it here. Raises RequestRefused."""
        return self.decode.take(front, request)

    def abort(self, front: str, request_id: str) -> list[Addressed]:
        return self.decode.abort(front, request_id)

    def finish_choice(self, front: str, request_id: str, choice: int) -> bool:
        return self.decode.finish_choice(front, request_id, choice)

    def progress(self, front: str, request_id: str) -> RequestProgress | None:
        return self.decode.progress(front, request_id)

    def drop(self, front: str) -> list[Addressed]:
        return self.decode.drop(front)

    def abort_all(self) -> list[Addressed]:
        return self.decode.abort_all()

    @staticmethod
    def is_peer(front: str) -> bool:
        """Whether messages of the engine to this front go to another engine."""
        return front.startswith(FRONT)

    def deliver(self, front: str, message: CoreMessage) -> None:
        """Take what the core sends to a front that is another engine."""
        if isinstance(message, Outputs):
            self.prefill.deltas(front, message.deltas)
        elif isinstance(message, Refused):
            self.prefill.refused(front, message.request_id, message.message)

    def faults(self) -> Iterator[str]:
        """Findings of an audit of the landing zone."""
        with self.office.zone.lock:
            yield from self.office.zone.zone.audit().faults

    def stats(self) -> TransferStats:
        office, tally = self.office, self.office.tally
        port, meters = office.hello.port, office.port.meters()
        waiting = self.prefill.waiting_prompts()
        with office.zone.lock:
            free, refused = office.zone.zone.credits, office.zone.zone.refused.items()
        return TransferStats(
            endpoint=self.endpoint,
            epoch=port.peer,
            fingerprint=port.fingerprint.hex(),
            facts={name: str(value) for name, value in asdict(office.hello.facts).items()},
            avoided=self.decode.peers.avoided(office.clock()),
            block_size=port.layout.block_size,
            block_bytes=office.hello.block_bytes,
            host_id=office.hello.host_id,
            transports=tuple(name for name, _ in port.endpoints),
            unmet=self.unmet,
            zone_slots=port.slots,
            free_slots=free,
            receiving=len(self.decode.open),
            helping=self.prefill.num_open,
            helping_waiting=len(waiting),
            helping_tokens=sum(waiting),
            prefill_tokens_per_s=tally.prefill_tokens_per_s,
            handover_s=tally.handover_s,
            outcomes=dict(tally.outcomes),
            fallbacks=dict(tally.reasons),
            helps=dict(tally.helps),
            blocks=dict(tally.blocks),
            refused={str(cause): count for cause, count in refused},
            bytes={name: num_bytes for name, (num_bytes, _) in meters.items()},
            seconds={name: seconds for name, (_, seconds) in meters.items()},
            rates={name: num_bytes / seconds for name, (num_bytes, seconds) in meters.items() if seconds > 0},
            load=tally.load.to_wire(),
        )

    def close(self) -> None:
        """End all connections and threads. May be called twice."""
        self.prefill.close()
        self.office.port.close()
        self.office.post.close()
