"""The model behind a front: the core's state, the tokenizer, the defaults, and whether requests are taken.

Owned by the front, which the core tells of each change. Without HTTP and without torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from stoker.engine.core.core_group import Cores
from stoker.engine.core.front_phase import front_phase
from stoker.engine.core.messages import CoreState, ModelFacts, Phase
from stoker.engine.core.stats import SharedStoreStats, TransferStats
from stoker.engine.http.errors import ApiError
from stoker.engine.http.openai.params import GenerationDefaults
from stoker.engine.http.text import TextCodec
from stoker.pod.causes import Cause


class ServedModel:
    """What is known of the model while it loads, serves and drains."""

    def __init__(self, core: Cores, open_codec: Callable[[Path], TextCodec]) -> None:
        self.core = core
        self.defaults = GenerationDefaults()
        """Those of the model's `generation_config.json`, once it is read."""
        self.draining = False
        self.broken: str | None = None
        """Problem of this front that keeps it from serving although the core could."""
        self.broken_cause = Cause.MODEL_ERROR
        self.on_broken: Callable[[str], None] = lambda _: None
        self.on_answers: Callable[[], None] = lambda: None
        """Called once this front has what it needs beside a core that serves."""
        self._open_codec = open_codec
        self._codec: TextCodec | None = None
        self._opening: asyncio.Task[None] | None = None
        core.on_state = self.follow

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted."""
        return self.core.serving and self._codec is not None and not self.draining and not self.unmet

    @property
    def phase(self) -> Phase:
        """The core's phase, as far as this front follows it."""
        return front_phase(self.core.state.phase, draining=self.draining, answers=self._codec is not None)

    @property
    def problem(self) -> str:
        """Why no requests are taken; empty while they are."""
        return self.broken or self.core.problem or self.unmet or self._unread

    @property
    def _unread(self) -> str:
        return "the tokenizer is being read" if self._codec is None else ""

    @property
    def facts(self) -> ModelFacts | None:
        return self.core.state.model

    @property
    def queue_s(self) -> Mapping[int, int]:
        """The core's newest histogram of the time from a request's arrival to its first step."""
        stats = self.core.stats
        return stats.queue_s if stats is not None else {}

    @property
    def shared_store(self) -> SharedStoreStats | None:
        """The core's newest report on the store that engines share; None without one."""
        stats = self.core.stats
        return stats.shared_store if stats is not None else None

    @property
    def transfer(self) -> TransferStats | None:
        """The core's newest report on other engines; None where it has nothing to do with them."""
        stats = self.core.stats
        return stats.transfer if stats is not None else None

    @property
    def step_tokens(self) -> tuple[int, int | None]:
        """Tokens of a full step, and prompt tokens of one beside decodes, as far as they are known."""
        facts = self.facts
        return (facts.step_tokens, facts.mixed_tokens) if facts is not None else (0, None)

    @property
    def unmet(self) -> str:
        """Why `transfer.require` is not met; empty while it is."""
        return self.core.stats.unmet if self.core.stats is not None else ""

    def follow(self, state: CoreState) -> None:
        """Follow a change of the core's state; called for each."""
        if state.model is not None and self._opening is None:
            self._opening = asyncio.create_task(self._open(Path(state.model.tokenizer_folder)))

    async def _open(self, folder: Path) -> None:
        """Load tokenizer and defaults while the core still warms up."""
        try:
            self.defaults = await asyncio.to_thread(GenerationDefaults.load, folder)
            self._codec = await asyncio.to_thread(self._open_codec, folder)
        except Exception as error:  # noqa: BLE001 - `/status` shows any reason
            self.broken = f"{folder}: {error}"
            self.on_broken(self.broken)
            return
        self.on_answers()

    def taken(self) -> tuple[ModelFacts, TextCodec]:
        """Return facts and tokenizer of the model, where it takes requests.

        Raises:
            ApiError: 503, it does not now.
        """
        facts, codec = self.facts, self._codec
        if self.ready and facts is not None and codec is not None:
            return facts, codec
        if self.draining or self.core.state.phase in ("Draining", "Drained"):
            raise ApiError(503, "The engine is draining and accepts no new requests.", code="draining", retry_after_s=1)
        message = self.problem
        raise ApiError(503, f"The engine is not ready: {message}", code="not_ready", retry_after_s=1)

    def health(self) -> dict[str, str]:
        """`GET /health`: healthy, degraded (it answers, but not as it should) or unhealthy, with the reason."""
        stats = self.core.stats
        if self.draining or self.core.state.phase in ("Draining", "Drained"):
            return {"status": "degraded", "reason": "draining: no new requests are taken"}
        if not self.ready:
            return {"status": "unhealthy", "reason": self.problem}
        if stats is not None and stats.leaked_blocks:
            return {"status": "degraded", "reason": f"{stats.leaked_blocks} lost blocks of the cache were given back"}
        return {"status": "healthy", "reason": ""}
