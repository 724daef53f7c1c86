"""A subscriber to cache events knows what the prefix cache holds: after any history, and over sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
import zmq
from hypothesis import settings
from hypothesis.stateful import invariant

from stoker.engine.config import CacheEventsConfig, EngineConfig
from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.build import publish_cache
from stoker.engine.core.cache_event_publisher import END, CacheEventPublisher
from stoker.engine.core.cache_events import CacheEventLog, encode_batch, event_hash
from stoker.engine.plan_checks import refuse_cache_events
from stoker.engine.sampling import SamplingParams
from stoker.pod.config_file import ConfigError
from tests.engine.conftest import MakeEngine
from tests.engine.test_blocks import AnyHistory
from tests.engine.test_engine import drive

ROOT = b"root of a test"


class Subscriber:
    """Applies batches as they come over the wire."""

    def __init__(self) -> None:
        self.view: set[int] = set()
        self.known: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        """Parent and tokens by hash, of all that was ever stored."""
        self.cleared = 0

    def apply(self, batch: bytes) -> None:
        _, events, _ = msgpack.unpackb(batch)
        for name, *fields in events:
            getattr(self, name)(*fields)

    def BlockStored(self, hashes: list[int], parent: int | None, tokens: list[int], size: int,
                    lora_id: None, medium: str, lora_name: None) -> None:  # fmt: skip
        assert (len(tokens), lora_id, medium, lora_name) == (len(hashes) * size, None, "CPU", None)
        for place, one in enumerate(hashes):
            content = parent, tuple(tokens[place * size : (place + 1) * size])
            assert one not in self.view, "stored twice"
            assert self.known.setdefault(one, content) == content
            self.view.add(one)
            parent = one

    def BlockRemoved(self, hashes: list[int], medium: str) -> None:
        assert medium == "CPU"
        for one in hashes:
            self.view.remove(one)

    def AllBlocksCleared(self) -> None:
        self.view.clear()
        self.cleared += 1

    def num_findable(self, tokens: list[int], size: int) -> int:
        """Leading blocks of a prompt in the view; the block with the last token never counts."""
        found, parents = 0, set[int | None]([None])
        for start in range(0, len(tokens) - size, size):
            block = tuple(tokens[start : start + size])  # events do not tell salts, so there may be several of them
            parents = {one for one in self.view if self.known[one][0] in parents and self.known[one][1] == block}
            if not parents:
                break
            found += 1
        return found


def contents(blocks: BlockManager) -> set[int]:
    return {event_hash(content.digest) for content in blocks.all_contents()}


class FollowedHistory(AnyHistory):
    """Any history of the block pool, with a subscriber that is told after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(num_blocks=10, block_size=2, root=ROOT)
        self.blocks.log = self.log = CacheEventLog(2, ROOT)
        self.subscriber = Subscriber()

    @invariant()
    def the_view_is_the_cache(self) -> None:
        self.subscriber.apply(encode_batch(self.log.take(), 1.0, "CPU", 0))
        assert self.subscriber.view == contents(self.blocks)
        assert self.subscriber.cleared == 1
        for owner, tokens in self.tokens.items():
            assert self.subscriber.num_findable(tokens, 2) >= self.blocks.num_findable(tokens, self.salts[owner])


TestFollowedHistory = FollowedHistory.TestCase
TestFollowedHistory.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def events_config(**changes: Any) -> CacheEventsConfig:
    fields = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*", "topic": "kv", **changes}
    return CacheEventsConfig.model_validate(fields)


@contextmanager
def connected(kind: int, endpoint: str | None) -> Iterator[Any]:
    assert endpoint is not None
    context = zmq.Context()
    socket = context.socket(kind)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"kv")
    try:
        socket.connect(endpoint)
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


def test_what_is_sent_is_the_content_of_an_engines_cache_and_late_subscribers_catch_up(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=14, block_size=4)
    blocks = engine.scheduler.blocks
    blocks.root = ROOT
    engine.cache_events = publisher = publish_cache(events_config(buffer_steps=1_000_000), blocks, "cpu")
    live: dict[int, bytes] = {}
    first, over = threading.Event(), threading.Event()

    def listen() -> None:
        with connected(zmq.SUB, publisher.endpoint) as socket:
            socket.setsockopt(zmq.RCVTIMEO, 20)
            while not over.is_set():
                try:
                    topic, sequence, batch = socket.recv_multipart()
                except zmq.Again:
                    continue
                assert topic == b"kv"
                live[int.from_bytes(sequence, "big")] = batch
                first.set()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    number = 0
    while number < 12 or not first.is_set():  # more than the cache holds, and until the listener is connected
        tokens = [5 + number % 7] * 6 + [3 + number % 50] * 11
        engine.add_request(f"r{number}", tokens, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        drive(engine)
        number += 1
    over.set()
    listener.join()
    kept = ask(publisher, 0)
    assert sorted(kept) == list(range(len(kept)))
    subscriber = Subscriber()
    for sequence in sorted(kept):
        subscriber.apply(kept[sequence])
    assert subscriber.view == contents(blocks)
    assert len(subscriber.known) > len(subscriber.view) > 0, "some were evicted"
    assert live
    assert live.items() <= kept.items()
    last = max(kept)
    assert ask(publisher, last) == {last: kept[last]}
    assert ask(publisher, last + 1) == {}
    engine.close()


def ask(publisher: CacheEventPublisher, begin: int) -> dict[int, bytes]:
    """Ask for the kept batches from `begin` on, as vLLM's subscribers do."""
    found: dict[int, bytes] = {}
    with connected(zmq.DEALER, publisher.replay_endpoint) as socket:
        socket.send_multipart((b"", begin.to_bytes(8, "big")))
        while True:
            empty, sequence, batch = socket.recv_multipart()
            assert empty == b""
            if sequence == END:
                assert batch == b""
                return found
            found[int.from_bytes(sequence, "big")] = batch


def test_the_newest_batches_are_kept_and_odd_requests_get_no_answer() -> None:
    blocks = BlockManager(8, 2, root=ROOT)
    publisher = publish_cache(events_config(buffer_steps=2), blocks, "cpu")
    try:
        for owner in range(3):
            blocks.admit(owner, [owner, owner, 9])
            blocks.commit(owner, [owner, owner, 9], 2)
            publisher.publish()
            publisher.publish()  # nothing new: no batch
        with connected(zmq.DEALER, publisher.replay_endpoint) as socket:
            socket.send_multipart((b"", b"short"))
            socket.send_multipart((b"", (0).to_bytes(8, "big")))
            sequences = [socket.recv_multipart()[1] for _ in range(3)]
        assert sequences == [(2).to_bytes(8, "big"), (3).to_bytes(8, "big"), END]
    finally:
        publisher.close()


def test_an_endpoint_in_use_is_refused_by_name() -> None:
    blocks = BlockManager(8, 2, root=ROOT)
    publisher = publish_cache(events_config(), blocks, "cpu")
    try:
        with pytest.raises(ConfigError, match=r"cache_events.replay_endpoint 'tcp://.*' cannot be bound: Address"):
            publish_cache(
                events_config(replay_endpoint=publisher.replay_endpoint), BlockManager(8, 2, root=ROOT), "cpu"
            )
    finally:
        publisher.close()


def test_copies_of_the_model_have_ports_of_their_own() -> None:
    second = events_config(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5657").of_rank(2)
    assert (second.rank, second.endpoint, second.replay_endpoint) == (2, "tcp://*:5559", "tcp://*:5659")
    assert events_config(replay_endpoint=None).of_rank(1).replay_endpoint is None
    assert events_config(endpoint="tcp://*:0").of_rank(1).endpoint == "tcp://*:0"


def test_events_without_a_prefix_cache_are_refused() -> None:
    config = EngineConfig.model_validate(
        {"model": {"path": "/m"}, "cache": {"prefix_cache": False}, "cache_events": {"endpoint": "tcp://*:5557"}}
    )
    with pytest.raises(ConfigError, match=r"cache_events needs cache.prefix_cache true, got false"):
        refuse_cache_events(config)
