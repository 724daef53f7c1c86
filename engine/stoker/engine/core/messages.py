"""The wire between fronts and core: frozen values and their msgpack form.

The core binds one zmq ROUTER socket (`ipc://` in the engine's work folder); every front connects a DEALER. A message is
one frame, `pack(message)`. A front's first message is `Hello`, answered with the present `CoreState`. From then on the
core sends it:

- each `Outputs` and `Refused` of its own requests, and every change of `CoreState`;
- `Stats` about once a second;
- a `Heartbeat` about once a second, and before work that may silence the core for longer than the last one announced.

A front sends `Ping` at least every 5 s; requests of a front that is silent for 30 s are aborted, and those of a front
whose process has ended as soon as its parent sends `Forget`. Request ids belong to
the front that chose them, so two fronts may use the same. All times are `time.monotonic()` seconds, which the processes
of one machine share.

Request: `AddRequest` -> `Refused` | `Outputs` with deltas; each choice ends with exactly one delta that has a
`finish_reason`. A front finds stop texts in what it detokenises and sends `Finish`; for a client that has gone it sends
`Abort`. Both end the choice at once without a further delta; either is harmless for a request that has ended.

Sent and received by `core` and `core_client`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgpack

from stoker.engine.core.frames import FrameFormat, many, many_or_none, one
from stoker.engine.core.stats import (
    ClassStats,
    ColdTierStats,
    ExpertStats,
    HostTierStats,
    PeerCopy,
    SharedStoreStats,
    Stats,
    TransferStats,
)
from stoker.engine.errors import RefusalKind, RequestRefused
from stoker.engine.execution.executor import RankState
from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.sampling import SamplingParams

PROTOCOL = 16

FinishReason = Literal["stop", "length", "abort", "error"]
RequestState = Literal["QUEUED", "PREFILLING", "DECODING", "PREEMPTED"]
"""PREFILLING is also the recomputation after a preemption."""
Phase = Literal["Loading", "Warming", "Serving", "Draining", "Drained", "Failed"]


# From a front to the core.


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a front."""

    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A new request. `params.stop` is ignored by the core; a missing seed is drawn by the core."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    """When the request reached the engine's front; queue time and time to first token count from here."""
    priority: int = 0
    """A lower number is served first, within a class."""
    resumed: tuple[tuple[int, ...] | None, ...] = ()
    """Output tokens of each choice that another engine made, None for a choice that has ended; empty: a new request.
    The next token of a choice is the one that the other engine would have sampled."""
    prefill: str = ""
    """`host:port` at which another engine takes prompts for this one; empty: the prompt is computed here."""
    trace: str = ""
    """W3C `traceparent` of the request's span at the front; empty without one."""
    place: int = 0
    """The number of its class; a lower one is served first."""
    beginning: str = ""
    """A router's name for the beginning of the prompt; empty: it has none."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End every choice of these requests without further deltas: the client has gone."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """End this choice as a success (counted with reason `stop`) without further deltas: the front found a stop text."""

    request_id: str
    choice: int


@dataclass(frozen=True, slots=True)
class Inspect:
    """Ask how far these requests are; answered by `Inspected` with the same `query`."""

    query: str
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Sign of life of a front."""


@dataclass(frozen=True, slots=True)
class Forget:
    """The process of another front has ended: abort its requests now. Sent by the program that had started it."""

    front: str
    """The hex of its socket's identity."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new requests, let running ones end within `deadline_s` seconds, then enter `Drained`.

    Requests that still run are aborted, and their clients see `abort`. May be repeated; the earlier deadline wins.
    """

    deadline_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End the core process now and abort running requests."""


# From the core to fronts.


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the served model that fronts need."""

    path: str
    """The configured path."""
    tokenizer_folder: str
    """Folder with tokenizer files, chat template and generation_config.json (a converted one for a GGUF file)."""
    digest: str | None
    """The checkpoint's manifest digest, where there is one."""
    dtype: str
    vocab_size: int
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    mixed_tokens: int | None = None
    """Prompt tokens of a step beside decodes while few wait; None: as many as fit."""
    step_tokens: int = 0
    """Tokens of a full step; 0: not known."""


@dataclass(frozen=True, slots=True)
class CoreState:
    """The core's phase. `model` is set from Warming on; `Failed` is final, with the cause in `message`."""

    phase: Phase
    message: str
    model: ModelFacts | None = None
    startup: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each finished part of the start-up, in order."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Counts and times for `usage` and the latency histograms.

    Sent with a choice's last delta, and with its first one, because a choice that ends by a stop text has no last
    delta.
    """

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens taken from the prefix cache."""
    output_tokens: int
    """Generated tokens, the end or stop token included."""
    preemptions: int
    arrival_s: float
    scheduled_s: float | None
    """Start of its first step; None if there was none."""
    first_token_s: float | None
    last_token_s: float | None
    finished_s: float
    helped: bool = False
    """Whether another engine computed the prompt."""


class Delta(NamedTuple):
    """New output of one choice, the last if it has a `finish_reason`. A tuple, because a step makes hundreds."""

    request_id: str
    choice: int
    tokens: tuple[int, ...]
    """New output tokens. An end or stop token that ended the choice is not among them; see `stop_token`."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token, then that of `stop_token`, if requested."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """If requested, with the first delta of choice 0; the first entry is None."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The end or stop token that ended it (`finish_reason` is `stop`)."""
    error: str | None = None
    """The reason, when `finish_reason` is `error`."""
    facts: RequestFacts | None = None
    error_field: str | None = None
    """The field of the request that caused the error; None where it was not the request."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The deltas of one step for one front."""

    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Refusal of a request; `RequestRefused` explains the kinds."""

    request_id: str
    kind: RefusalKind
    message: str
    field: str | None = None

    def to_error(self) -> RequestRefused:
        return RequestRefused(self.kind, self.message, self.field)


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """How far a request is that has not ended."""

    request_id: str
    state: RequestState
    cached_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Inspected:
    """The requests of an `Inspect` that have not ended."""

    query: str
    requests: tuple[RequestProgress, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sign of life of the core's loop. A front that receives nothing for longer than `quiet_s` counts the core as
    stalled."""

    quiet_s: float
    """The longest healthy silence, until the next heartbeat."""
    usual_step_s: float | None
    """Median of recent steps; None before the first."""


FrontMessage = Hello | AddRequest | Abort | Finish | Inspect | Ping | Forget | Drain | Stop
CoreMessage = CoreState | Outputs | Refused | Inspected | Stats | Heartbeat
Message = FrontMessage | CoreMessage

_FORMAT = FrameFormat(
    f"protocol {PROTOCOL}",
    messages=(
        Hello, AddRequest, Abort, Finish, Ping, Drain, Stop, CoreState, Outputs, Refused, Stats, Heartbeat, Inspect,
        Inspected, Forget,
    ),
    nested={
        AddRequest: {"params": one(SamplingParams)},
        SamplingParams: {"grammar": one(OutputGrammar)},
        CoreState: {"model": one(ModelFacts)},
        Outputs: {"deltas": many_or_none(Delta)},
        Inspected: {"requests": many_or_none(RequestProgress)},
        Stats: {
            "host": one(HostTierStats),
            "disk": one(ColdTierStats),
            "store": one(ColdTierStats),
            "experts": one(ExpertStats),
            "transfer": one(TransferStats),
            "ranks": many(RankState),
            "classes": many(ClassStats),
            "shared_store": one(SharedStoreStats),
        },
        TransferStats: {"copies": many(PeerCopy)},
        Delta: {
            "logprobs": many_or_none(TokenLogprobs),
            "prompt_logprobs": many_or_none(TokenLogprobs),
            "facts": one(RequestFacts),
        },
    },
    packed={AddRequest: ("prompt_tokens",)},
)  # fmt: skip


def pack(message: Message) -> bytes:
    """Encode a message as one frame."""
    return _FORMAT.pack(message)


def unpack(frame: bytes) -> Message:
    """Decode the message in a frame.

    Raises:
        ProtocolError: the frame is not msgpack, has an unknown tag, or its fields do not fit.
        RequestRefused: an AddRequest whose sampling values are not allowed.
    """
    message: Message = _FORMAT.unpack(frame)
    return message


def request_id_in(frame: bytes) -> str:
    """Request id of an AddRequest whose other fields were refused."""
    _, values = msgpack.unpackb(frame, use_list=False, strict_map_key=False)
    return str(values[0])
