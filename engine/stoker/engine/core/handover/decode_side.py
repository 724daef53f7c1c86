"""A request whose prompt another engine computes, as its owner sees it. Values and states; no engine, no memory.

    NEW -> RESERVED -> FILLING -> VERIFIED -> TAKEOVER -> RUNNING
      |        |          |           |
      +--------+----------+-----------+--> LOCAL    computed here, behind what has come
      +--------+----------+-----------+--> ENDED    the client has gone, or P has finished the whole answer

Output tokens have positions. A part that does not begin where its choice stands is refused, so a repeated message
doubles nothing, and a lost one loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stoker.engine.core.handover.messages import Part
from stoker.engine.core.messages import AddRequest, RequestFacts
from stoker.engine.transfer.fingerprint import salt_digest
from stoker.engine.transfer.landing_zone import Owner


class Stage(Enum):
    NEW = "new"
    """The peer is being greeted."""
    RESERVED = "reserved"
    """Sent to the peer; blocks are promised."""
    FILLING = "filling"
    """Blocks or tokens have come."""
    VERIFIED = "verified"
    """All of the prompt's full blocks are in the cache and compared."""
    TAKEOVER = "takeover"
    """This engine goes on; its first token has not come."""
    RUNNING = "running"
    LOCAL = "local"
    ENDED = "ended"

    @property
    def open(self) -> bool:
        """Whether the peer works for it."""
        return self in (Stage.NEW, Stage.RESERVED, Stage.FILLING, Stage.VERIFIED)


@dataclass
class Output:
    """What the client has of one choice."""

    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    first_s: float | None = None
    last_s: float | None = None


@dataclass(eq=False)
class Split:
    """One request. `outputs` has an entry for each choice."""

    id: str
    """Of the dispatch; never used again."""
    front: str
    request: AddRequest
    peer: str
    """Endpoint of P."""
    block_size: int
    began_s: float
    first_block: int
    """Leading blocks that were here before."""
    peer_block_size: int = 1
    """P sends what is in its own full blocks."""
    moved_s: float = 0.0
    """When something last came for it."""
    stage: Stage = Stage.NEW
    owner: Owner | None = None
    """Of its slots, once P is known."""
    sound: set[int] = field(default_factory=set)
    """Indices of blocks that are in the cache and compared."""
    cached_tokens: int = 0
    """Prompt tokens found in a prefix cache, of P or here."""
    outputs: list[Output] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = [Output() for _ in range(self.request.params.n)]
        self.moved_s = self.began_s
        self.cached_tokens = self.first_block * self.block_size

    @property
    def key(self) -> tuple[str, str]:
        return self.front, self.request.request_id

    @property
    def salt(self) -> bytes:
        """Of the keys of its blocks."""
        return salt_digest(self.request.params.cache_salt)

    @property
    def num_blocks(self) -> int:
        """Full blocks of the prompt that P can send."""
        sent = len(self.request.prompt_tokens) // self.peer_block_size * self.peer_block_size
        return sent // self.block_size

    @property
    def num_verified(self) -> int:
        """Leading blocks that can be used."""
        count = self.first_block
        while count in self.sound:
            count += 1
        return count

    @property
    def begun(self) -> bool:
        """Whether the client has a token or an end of any choice."""
        return any(output.tokens or output.ended for output in self.outputs)

    @property
    def all_ended(self) -> bool:
        return all(output.ended for output in self.outputs)

    @property
    def complete(self) -> bool:
        """Whether this engine can go on without computing more than the rest of a block, of either engine."""
        return self.num_verified == self.num_blocks and all(one.tokens or one.ended for one in self.outputs)

    def note_sound(self, indices: list[int], now_s: float) -> None:
        self.sound.update(indices)
        self._move(now_s)

    def accept(self, part: Part, now_s: float) -> bool:
        """Take new output. False: it does not go on where its choice stands, or the choice has ended.

        Raises:
            ValueError: tokens before it are missing.
        """
        if not 0 <= part.choice < len(self.outputs):
            raise ValueError(f"choice must be 0 to {len(self.outputs) - 1}, got {part.choice}")
        output = self.outputs[part.choice]
        if output.ended or part.position < len(output.tokens):
            return False
        if part.position > len(output.tokens):
            raise ValueError(f"tokens {len(output.tokens)} to {part.position - 1} of choice {part.choice} are missing")
        output.tokens += part.tokens
        output.first_s = output.first_s if output.first_s is not None else now_s
        output.last_s, output.ended = now_s, part.finish_reason is not None
        self.cached_tokens = max(self.cached_tokens, part.cached_tokens)
        self._move(now_s)
        return True

    def facts(self, choice: int, finished_s: float, part: Part | None = None) -> RequestFacts:
        """Counts and times of a choice, with its last `part`, if it has one."""
        output = self.outputs[choice]
        more = part is not None and part.stop_token is not None
        return RequestFacts(
            prompt_tokens=len(self.request.prompt_tokens), cached_tokens=self.cached_tokens,
            output_tokens=len(output.tokens) + more, preemptions=0, arrival_s=self.request.arrival_s,
            scheduled_s=self.began_s, first_token_s=output.first_s, last_token_s=output.last_s,
            finished_s=finished_s, helped=True,
        )  # fmt: skip

    def _move(self, now_s: float) -> None:
        self.moved_s = now_s
        if self.stage is Stage.RESERVED:
            self.stage = Stage.FILLING
        if self.stage is Stage.FILLING and self.num_verified == self.num_blocks:
            self.stage = Stage.VERIFIED

    def finish_choice(self, choice: int) -> None:
        """The front has found a stop text."""
        self.outputs[choice].ended = True

    def resumed(self) -> tuple[tuple[int, ...] | None, ...]:
        """What `AddRequest.resumed` needs to go on here; empty while the client has nothing."""
        if not self.begun:
            return ()
        return tuple(None if output.ended else tuple(output.tokens) for output in self.outputs)
