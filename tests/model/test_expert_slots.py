"""The slots of a layer's experts: what computes is there, nothing is loaded twice, and the least used makes room."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.model.expert_slots import HALF_LIFE, ExpertSlots, Place, Round


class EagerTwin:
    """The same decisions by lists that are gone through each time."""

    def __init__(self, num_experts: int, num_slots: int) -> None:
        self.held: list[int | None] = [None] * num_slots
        self.scores, self.last, self.turns = [0.0] * num_experts, [0] * num_experts, 0

    def turn(self, wanted: set[int]) -> list[tuple[dict[int, int], list[tuple[int, int]]]]:
        self.turns += 1
        if self.turns % HALF_LIFE == 0:
            self.scores = [float(int(score) // 2) for score in self.scores]
        for expert in wanted:
            self.scores[expert] += 2**20
            self.last[expert] = self.turns
        left, rounds = sorted(wanted), []
        now = [expert for expert in left if expert in self.held]
        while left:
            missing = [expert for expert in left if expert not in now]
            now += missing[: len(self.held) - len(now)]
            loads = [(expert, self.load(expert, now)) for expert in now if expert not in self.held]
            rounds.append(({expert: self.held.index(expert) for expert in sorted(now)}, loads))
            left, now = [expert for expert in left if expert not in now], []
        return rounds

    def load(self, expert: int, kept: list[int]) -> int:
        ranks = [
            (-1.0, 0, slot) if held is None else (self.scores[held], self.last[held], held)
            for slot, held in enumerate(self.held)
        ]
        free = [slot for slot, held in enumerate(self.held) if held is None or held not in kept]
        slot = min(free, key=lambda one: ranks[one])
        self.held[slot] = expert
        return slot


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[set[int]]]:
    num_experts = draw(st.integers(1, 12))
    turns = st.lists(st.sets(st.integers(0, num_experts - 1)), min_size=1, max_size=3 * HALF_LIFE)
    return num_experts, draw(st.integers(1, num_experts)), draw(turns)


@settings(max_examples=150, deadline=None)
@given(history=histories())
def test_every_expert_computes_once_from_a_slot_that_holds_it(history: tuple[int, int, list[set[int]]]) -> None:
    num_experts, num_slots, turns = history
    slots, twin = ExpertSlots(num_experts, num_slots), EagerTwin(num_experts, num_slots)
    content: dict[int, int] = {}
    for wanted in turns:
        held = set(content.values())
        rounds = slots.turn(wanted)
        for one in rounds:
            content |= {slot: expert for expert, slot in one.loads}
            assert all(content[slot] == expert for expert, slot in one.places)
            assert len({slot for _, slot in one.places}) == len(one.places) <= num_slots
            assert set(one.loads) <= set(one.places)
        assert sorted(expert for one in rounds for expert, _ in one.places) == sorted(wanted)
        assert sum(len(one.loads) for one in rounds) == len(wanted - held), "what was there is not loaded"
        assert len(rounds) == -(-len(wanted) // num_slots), "as few rounds as there can be"
        assert slots.slot_of == {expert: slot for slot, expert in content.items()}
        assert [(dict(one.places), list(one.loads)) for one in rounds] == twin.turn(wanted)


def test_the_least_and_longest_unused_makes_room() -> None:
    slots = ExpertSlots(8, 3)
    for wanted in ((0, 1), (0, 2), (0,)):
        slots.turn(wanted)
    assert slots.turn((4,)) == (Round((Place(4, 1),), (Place(4, 1),)),), "1 and 2 were used once, 1 before 2"
    assert slots.turn((5,)) == (Round((Place(5, 2),), (Place(5, 2),)),)
    for _ in range(HALF_LIFE * 4):
        slots.turn((6,))
    assert slots.score(0) < slots.score(6), "three uses long ago are not worth a recent one"
    slots.forget()
    both = Place(0, 0), Place(6, 1)
    assert slots.turn((0, 6)) == (Round(both, both),)


@pytest.mark.parametrize("num_slots", [0, 9])
def test_a_number_of_slots_that_cannot_be_is_refused(num_slots: int) -> None:
    with pytest.raises(ValueError, match=f"slots must be from 1 to 8, the number of experts, got {num_slots}"):
        ExpertSlots(8, num_slots)
