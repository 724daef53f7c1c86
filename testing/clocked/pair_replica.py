"""One engine of a prefill or a decode pool in virtual time: prompts computed for others, and answers taken over.

The hand-over is that of production without its messages: the prefill engine streams until the blocks have travelled,
then the decode engine goes on behind its tokens and finds the prompt in its prefix cache. Nothing fails on the way.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.engine.core.load_counters import LoadCounters
from stoker.engine.core.messages import Delta, RequestFacts
from stoker.engine.sampling import SamplingParams
from stoker.operator.domain.autoscaling.load_report import LoadReport
from stoker.router.load import Peer
from stoker.router.snapshot import Role
from testing.clocked.replica import ClockedReplica, EngineSettings, Served

HANDOVER_S = 0.025
PEER = Peer(
    endpoint="h:1", epoch="e", fingerprint="fp", block_size=64, transports=("cuda-ipc",), host_id="h",
    handover_s=HANDOVER_S,
)  # fmt: skip


class PairReplica(ClockedReplica):
    """An engine that can do the work of both roles."""

    def __init__(self, name: str, settings: EngineSettings, home: Role) -> None:
        super().__init__(name, settings)
        self.role = self.home = home
        """The pool that it serves, and the one that it was started for."""
        self.helped = LoadCounters()
        self.begun: list[tuple[Served, PairReplica]] = []
        """Prompts for others whose first token has come since it was emptied, and who asked."""
        self._helps: dict[str, tuple[float, PairReplica, RequestFacts | None]] = {}
        """When each came here, who asked for it, and the facts of its first token."""

    def tell(self, now_s: float) -> None:
        """Report its load to the router, with itself as a peer."""
        before = self.load
        super().tell(now_s)
        if self.load is not None and self.load is not before:
            self.load = self.load.model_copy(update={"peer": PEER})

    def expect(self, served: Served) -> None:
        """Count a request whose prompt another engine computes."""
        name = str(served.request.number)
        self._served[name] = served
        self.pending += 1
        self.counters.arrived += 1
        self.ledger.waiting[name] = 0

    def help(self, now_s: float, served: Served, owner: PairReplica, uncached: int) -> None:
        """Queue a prompt of another engine."""
        name = str(served.request.number)
        self._helps[name] = now_s, owner, None
        self.helped.arrived += 1
        self.add(now_s, served, uncached)
        self.counters.arrived -= 1

    def helps(self, served: Served) -> bool:
        """Whether it still decodes for another engine."""
        return str(served.request.number) in self._helps

    def relieve(self, served: Served) -> None:
        """Stop decoding for another engine."""
        name = str(served.request.number)
        self._leave(name, served.tokens)
        self.engine.withdraw(name, front="")
        self.pending -= 1

    def take_over(self, now_s: float, served: Served) -> bool:
        """Go on with an answer; False while there is no room for its prompt."""
        name, tokens, blocks = str(served.request.number), served.request.tokens(), self.engine.scheduler.blocks
        if blocks.admit(name, tokens, keep_free=len(self.engine.scheduler.running)) is None:
            return False
        blocks.commit(name, tokens, len(tokens))
        blocks.release(name)
        params = SamplingParams(max_tokens=served.request.output, ignore_eos=True, seed=0)
        self._clock.now_s = now_s
        self.engine.add_request(name, tokens, params, arrival_s=served.arrived_s, resumed=((1,) * served.tokens,))
        return True

    def report(self) -> LoadReport:
        """The engine's load, with what it computes for others."""
        own, self.counters = self.counters, LoadCounters()
        self.counters.add(own)
        self.counters.add(self.helped)
        found = super().report()
        self.counters = own
        return found

    def _take(self, delta: Delta) -> Served | None:
        if delta.request_id not in self._helps:
            return super()._take(delta)
        came_s, owner, facts = self._helps[delta.request_id]
        served, now_s = self._served[delta.request_id], self._clock.now_s
        served.tokens += len(delta.tokens)
        if facts is None:
            self._first(delta, served, now_s - came_s)
        else:
            owner.counters.more_tokens(now_s - (served.last_s or now_s), len(delta.tokens))
        served.last_s = now_s
        if delta.finish_reason is None:
            return None
        self._leave(delta.request_id, served.tokens)
        return owner.ended_elsewhere(delta, served)

    def _first(self, delta: Delta, served: Served, waited_s: float) -> None:
        came_s, owner, _ = self._helps[delta.request_id]
        assert delta.facts is not None
        self._helps[delta.request_id] = came_s, owner, delta.facts
        served.first_s = self._clock.now_s
        served.uncached = delta.facts.prompt_tokens - delta.facts.cached_tokens
        self.helped.first_token(waited_s)
        owner.counters.first_token(served.first_token_s)
        owner.ledger.first_token(delta.request_id, replace(delta.facts, helped=True))
        self.ledger.first_token(delta.request_id, delta.facts)
        self._unstarted.pop(delta.request_id, None)
        self.begun.append((served, owner))

    def _leave(self, name: str, tokens: int) -> None:
        """Count a help that is over here."""
        facts = self._helps.pop(name)[2]
        if facts is not None:
            self.helped.finished(replace(facts, output_tokens=tokens))
        self.ledger.running.discard(name)
        self._served.pop(name, None)

    def ended_elsewhere(self, delta: Delta, served: Served) -> Served:
        """Count an answer that ended at the engine that helped."""
        if delta.facts is not None:
            self.counters.finished(replace(delta.facts, helped=True))
        self.ledger.running.discard(delta.request_id)
        self._served.pop(delta.request_id, None)
        self.pending -= 1
        return served
