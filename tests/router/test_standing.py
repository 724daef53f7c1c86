"""What a router keeps of each engine between decisions is what it would compute anew, whatever has happened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.router.backend import Backend, Timeouts
from stoker.router.cache_aware import CacheAware
from stoker.router.load import SILENT_S, YOUNG_S
from stoker.router.snapshot import BackendEntry
from stoker.router.standing import measured, standing_of
from stoker.router.work import Work
from testing.router.places import LOADS, Engine, report

EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.just("reports"), LOADS.filter(lambda load: load is not None))
    | st.tuples(st.integers(0, 3), st.just("dispatch"), st.integers(0, 20_000))
    | st.tuples(st.integers(0, 3), st.sampled_from(["answers", "ends"]), st.none())
    | st.tuples(st.integers(0, 3), st.just("flips"), st.sampled_from(["colocated", "prefill", "decode"]))
    | st.tuples(st.integers(0, 3), st.just("time"), st.sampled_from([0.1, YOUNG_S, YOUNG_S + 0.1, SILENT_S])),
    max_size=12,
)


class Fleet:
    """Backends to which events happen."""

    def __init__(self) -> None:
        self.now_s, self.seq = 0.0, 0
        times = Timeouts(connect_s=1, silence_s=1, probe_s=1)
        entries = [BackendEntry(url=f"http://127.0.0.{number + 1}:1", pod_uid=str(number)) for number in range(4)]
        self.backends = [Backend(entry, times, lambda: self.now_s) for entry in entries]
        self.computing: list[list[ExitStack]] = [[] for _ in entries]
        self.running: list[list[ExitStack]] = [[] for _ in entries]

    def happens(self, number: int, name: str, value: Any) -> None:
        backend = self.backends[number]
        if name == "reports":
            self.seq += 1
            backend.reported(value.model_copy(update={"seq": self.seq}))
        elif name == "dispatch":
            self.running[number].append(entered(backend.request()))
            self.computing[number].append(entered(backend.computing(value)))
        elif name in ("answers", "ends"):
            ended = self.computing[number] if name == "answers" else self.running[number]
            if ended:
                ended.pop(0).close()
        elif name == "flips":
            backend.listed(backend.entry.model_copy(update={"role": value}))
        else:
            self.now_s += value


def entered(context: AbstractContextManager[None]) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(context)
    return stack


def anew(backend: Backend) -> Engine:
    """An engine of which the same is known, and nothing is kept."""
    copied = (backend.load, backend.pending, tuple(backend.unstarted), backend.silent)
    return Engine(backend.entry.pod_uid, backend.role, *copied, backend.revision)


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.integers(0, 20_000))
def test_decisions_are_those_of_a_router_that_keeps_nothing(events: list[Any], tokens: int) -> None:
    fleet, work = Fleet(), Work(tokens, may_split=True)
    for turn, event in enumerate(events):
        fleet.happens(*event)
        engines = [anew(backend) for backend in fleet.backends]
        assert [one.standing[1:] for one in fleet.backends] == [one.standing[1:] for one in engines]
        kept = CacheAware().pair(fleet.backends, fleet.backends, turn, work)
        fresh = CacheAware().pair(engines, engines, turn, work)
        assert kept.answers.entry.pod_uid == fresh.answers.name
        assert (kept.helper.entry.pod_uid if kept.helper else None) == (fresh.helper.name if fresh.helper else None)
        assert kept.uncached == fresh.uncached


def test_a_standing_is_kept_until_one_of_its_causes_changes() -> None:
    fleet = Fleet()
    backend = fleet.backends[0]
    changes: list[Callable[[], None]] = [
        lambda: fleet.happens(0, "reports", report(waiting=2, waiting_tokens=900, prompts=(600, 300))),
        lambda: fleet.happens(0, "dispatch", 5000),
        lambda: fleet.happens(0, "answers", None),
        lambda: fleet.happens(0, "ends", None),
        lambda: fleet.happens(0, "flips", "decode"),
        lambda: fleet.happens(0, "time", YOUNG_S + 0.1),
    ]
    for change in changes:
        before = backend.standing
        assert backend.standing is before
        change()
        assert backend.standing is not before
        assert backend.standing[1:] == standing_of(backend)[1:]


def test_a_request_with_its_first_byte_waits_no_longer_whatever_an_older_report_says() -> None:
    """A client that sends one request after the other would find its own last prompt before it."""
    fleet = Fleet()
    backend = fleet.backends[0]
    with backend.computing(1000), backend.computing(500):
        backend.reported(report(seq=1, requests=3, waiting=3, waiting_tokens=1700, prompts=(1000, 500, 200)))
        assert list(measured(backend, backend.load).prompts) == [1000, 500, 200]
    assert list(measured(backend, backend.load).prompts) == [200], "another router's"
    with backend.computing(900):
        pass
    assert list(measured(backend, backend.load).prompts) == [200], "no report has counted it"
    load = backend.load
    assert load is not None
    assert (load.waiting, load.waiting_tokens, load.decoding, load.prompts) == (1, 200, 2, (200,))
    with backend.computing(10):
        backend.reported(report(seq=2, requests=2, waiting=1, waiting_tokens=1500, prompts=(1500,)))
    assert list(measured(backend, backend.load).prompts) == [1500], "made before a request so short had come"
    with backend.computing(9000):
        backend.reported(report(seq=3, requests=2, waiting=2, waiting_tokens=9500, prompts=(500, 9000)))
    assert list(measured(backend, backend.load).prompts) == [9000], "most of it was computed"
    with backend.computing(900), backend.computing(100):
        backend.reported(report(seq=4, requests=4, waiting=4, waiting_tokens=2000))
    assert list(measured(backend, backend.load).prompts) == [500, 500], "equal parts, where they are not listed"
    with backend.computing(900):
        backend.reported(report(seq=5))
    assert list(measured(backend, backend.load).prompts) == []
