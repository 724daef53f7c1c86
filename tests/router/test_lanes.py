"""Which request goes next: against brute force, and over simulated engines in which predictions come true."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from stoker.router.lanes import Lanes, Miss, Outlook, Waiting
from stoker.router.request_class import RequestClass

GOALS = st.none() | st.sampled_from([0.5, 1.0, 2.0])


@st.composite
def classes_drawn(draw: st.DrawFn) -> tuple[RequestClass, ...]:
    return tuple(
        RequestClass(name=str(number), ttft_goal_s=draw(GOALS), max_queue_s=draw(st.sampled_from([0.0, 4.0, 10.0])))
        for number in range(draw(st.integers(1, 3)))
    )


def may_go(lanes: Lanes, all_waiting: list[Waiting], outlooks: dict[Waiting, Outlook], now_s: float,
           one: Waiting, *, rushing: bool) -> bool:  # fmt: skip
    """The rule as the module states it, for one request out of all."""
    classes, outlook = lanes.classes, outlooks[one]

    def old(other: Waiting) -> bool:
        after = classes[other.place].max_queue_s / 2
        return after > 0 and now_s - other.since_s >= after

    first_of_class = not any(
        other.place == one.place and all_waiting.index(other) < all_waiting.index(one) for other in all_waiting
    )
    if not first_of_class:
        return False
    fits = True
    for place in range(one.place + 1):
        goal = classes[place].ttft_goal_s
        if goal is None:
            continue
        behind = lanes.usual_s[place] if place < one.place else 0.0
        least = lanes.usual_s[place] if place < one.place else outlook.own_s
        came_s = max((other.since_s for other in all_waiting if other.place == place), default=-1e9)
        is_expected = place == one.place or now_s - came_s <= 4 * goal
        if is_expected and outlook.queue_s + outlook.own_s + behind > max(goal, least):
            fits = False
        if place < one.place and outlook.queue_s > goal / 4:
            fits = False
    if old(one):
        return fits or not rushing
    earlier = [other for other in all_waiting if other.place < one.place]
    heads = [other for other in earlier if not any(
        o.place == other.place and all_waiting.index(o) < all_waiting.index(other) for o in earlier)]  # fmt: skip
    return fits and all(old(other) for other in heads)


@given(classes_drawn(), st.data())
def test_the_choice_is_the_one_of_brute_force(classes: tuple[RequestClass, ...], data: st.DataObject) -> None:
    lanes, now_s = Lanes(classes), 20.0
    lanes.usual_s = [data.draw(st.sampled_from([0.0, 0.3, 3.0])) for _ in classes]
    sinces = sorted(data.draw(st.lists(st.floats(10, 20), max_size=5)))
    waiting = [lanes.join(data.draw(st.integers(0, len(classes) - 1)), since_s) for since_s in sinces]
    times = st.sampled_from([0.0, 0.2, 0.5, 1.0, 1.7, 5.0])
    outlooks = {one: Outlook(data.draw(times), data.draw(times)) for one in waiting}
    rushing = data.draw(st.booleans())
    if rushing:
        lanes.rush(Waiting(0, 0.0))
    chosen = lanes.next_one(now_s, outlooks.__getitem__)
    allowed = [one for one in waiting if may_go(lanes, waiting, outlooks, now_s, one, rushing=rushing)]
    assert (chosen is None) == (not allowed)
    if chosen is not None:
        assert chosen in allowed
        rank = [(not lanes.is_old(one, now_s), one.since_s if lanes.is_old(one, now_s) else one.place)
                for one in allowed]  # fmt: skip
        assert rank[allowed.index(chosen)] == min(rank)


def test_later_classes_leave_three_quarters_of_a_goal_free_of_prompts_that_wait() -> None:
    lanes = Lanes((RequestClass(name="a", ttft_goal_s=2.0), RequestClass(name="b", ttft_goal_s=9.0)))
    lanes.leave(lanes.join(0, 100.0))
    assert lanes.miss(1, Outlook(0.5, 1.0), 100.0) is None
    assert lanes.miss(1, Outlook(0.75, 0.0), 100.0) == Miss(0, 0.75, 0.5, is_room=True)
    assert lanes.miss(1, Outlook(0.75, 1.75), 100.0) == Miss(0, 2.5, 2.0), "the limit that is exceeded by more"
    assert lanes.miss(0, Outlook(0.75, 0.0), 100.0) is None


def test_a_class_without_requests_holds_no_later_one_back() -> None:
    lanes = Lanes((RequestClass(name="a", ttft_goal_s=2.0), RequestClass(name="b", max_queue_s=9.0)))
    long = Outlook(0.2, 30.0)
    assert lanes.miss(1, long, 0.0) is None, "none has ever come"
    lanes.leave(lanes.join(0, 0.0))
    assert lanes.miss(1, long, 8.0) == Miss(0, 30.2, 2.0)
    assert lanes.miss(1, long, 8.1) is None
    assert lanes.miss(1, Outlook(0.6, 0.1), 8.1) == Miss(0, 0.6, 0.5, is_room=True), "a burst may come"


@dataclass
class Engine:
    """One engine that computes prompts in their order, in a simulation with steps of 0.05 s."""

    free_s: float = 0.0
    """When it has computed all prompts that it got."""
    now_s: float = 0.0
    own_s: dict[Waiting, float] = field(default_factory=dict)
    sent: list[tuple[Waiting, Outlook, float, bool]] = field(default_factory=list)
    """(request, prediction, when it was sent, whether because of its age)"""

    def outlook(self, one: Waiting) -> Outlook:
        return Outlook(max(self.free_s - self.now_s, 0.0), self.own_s[one])


def simulate(
    classes: tuple[RequestClass, ...], arrivals: list[tuple[float, int, float]], until_s: float
) -> tuple[Engine, Lanes, list[Waiting], list[Miss]]:
    """Run arrivals (time, class, seconds of its prompt); return also who was left, and goals missed behind others."""
    engine, lanes = Engine(), Lanes(classes)
    missed: list[Miss] = []
    waiting: list[Waiting] = []
    queue = sorted(arrivals, key=lambda one: one[0])
    ends: dict[Waiting, float] = {}
    now_s, came_s = 0.0, -1e9
    while now_s < until_s and (queue or waiting):
        while queue and queue[0][0] <= now_s:
            since_s, place, own_s = queue.pop(0)
            one = lanes.join(place, since_s)
            engine.own_s[one] = own_s
            lanes.learn(place, own_s)
            came_s = since_s if place == 0 else came_s
            waiting.append(one)
        for one in [done for done, end_s in ends.items() if end_s <= now_s]:
            del ends[one]
            lanes.answered(one)
        engine.now_s = now_s
        while (going := lanes.next_one(now_s, engine.outlook)) is not None:
            one, outlook = going, engine.outlook(going)
            rushes = lanes.miss(one.place, outlook, now_s) is not None
            if rushes:
                lanes.rush(one)
            engine.free_s = max(engine.free_s, now_s) + engine.own_s[one]
            ends[one] = engine.free_s
            engine.sent.append((one, outlook, now_s, rushes))
            lanes.leave(one)
            waiting.remove(one)
            if not rushes and one.place == 1 and now_s - came_s <= 4 * 2.0:
                behind = Outlook(engine.free_s - now_s, lanes.usual_s[0])
                if (miss := lanes.miss(0, behind, now_s)) is not None:
                    missed.append(miss)
        now_s += 0.05
    return engine, lanes, waiting, missed


BOTH = (
    RequestClass(name="interactive", ttft_goal_s=2.0, max_queue_s=1e6, aging_s=5e5),
    RequestClass(name="batch", max_queue_s=1e6, aging_s=10.0),
)
ARRIVALS = st.lists(
    st.tuples(st.floats(0, 40), st.integers(0, 1), st.sampled_from([0.05, 0.4, 1.0, 3.0])), min_size=1, max_size=25
)


@given(ARRIVALS)
def test_no_request_that_goes_misses_its_goal_and_batch_leaves_room(arrivals: list[tuple[float, int, float]]) -> None:
    engine, _, left, missed = simulate(BOTH, arrivals, 400.0)
    assert left == []  # all had their turn, also batch prompts longer than the goal
    late = [miss for miss in missed if miss.excess_s > 1e-9]  # the same sum in another order may differ by a rounding
    assert late == []  # behind each batch request a usual interactive one had room
    for one, outlook, _, rushes in engine.sent:
        if one.place == 0:
            assert not rushes
            assert outlook.first_token_s <= max(2.0, outlook.own_s) + 1e-9


def test_interactive_requests_without_end_do_not_starve_batch() -> None:
    endless = [(0.05 * number, 0, 0.06) for number in range(4000)]  # more than the engine can do
    batch = [(20.0 + number, 1, 1.0) for number in range(5)]  # the engine is behind by then
    engine, _, _, _ = simulate(BOTH, endless + batch, 200.0)
    went = [(sent_s - one.since_s, rushes) for one, _, sent_s, rushes in engine.sent if one.place == 1]
    assert len(went) == 5
    assert all(rushes for _, rushes in went)
    longest = 2.0 + 1.0 + 0.1  # a first token of the one before it: the goal's queue, and its own prompt
    for number, (waited_s, _) in enumerate(went):
        assert 10.0 <= waited_s <= 10.0 + (number + 1) * longest


def test_without_goals_the_order_is_that_of_classes() -> None:
    lanes = Lanes((RequestClass(name="a"), RequestClass(name="b")))
    later, earlier = lanes.join(1, 0.0), lanes.join(0, 1.0)
    assert lanes.next_one(2.0, lambda _: Outlook(9.0, 9.0)) is earlier
    lanes.leave(earlier)
    assert lanes.next_one(2.0, lambda _: Outlook(9.0, 9.0)) is later
