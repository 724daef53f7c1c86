"""`autoscaling.mode: fixed`: constant numbers and ratios, and what becomes of writes to `/scale`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.domain.autoscaling.fixed import FixedPool, fixed_replicas
from testing.operator.serving_world import POOL, Serving


@pytest.mark.parametrize(
    ("prefill", "decode", "scale", "expected"),
    [(1, 3, 3, 1), (1, 3, 6, 2), (1, 3, 1, 1), (2, 1, 4, 8), (1, 3, 0, 0), (1, 3, 99, 10)],
)
def test_prefill_follows_decode_by_the_ratio_of_the_spec(prefill: int, decode: int, scale: int, expected: int) -> None:
    lead = FixedPool("decode", decode, 0, 30, scale)
    assert fixed_replicas(lead) == min(scale, 30)
    assert fixed_replicas(FixedPool("prefill", prefill, 0, 20, 7), lead) == expected


POOLS = st.builds(
    FixedPool, st.sampled_from(("colocated", "prefill", "decode")), st.integers(0, 20), st.integers(0, 5),
    st.integers(5, 20), st.integers(0, 30),
)  # fmt: skip


@given(pool=POOLS, decode=POOLS)
def test_the_bounds_hold_and_a_second_look_changes_nothing(pool: FixedPool, decode: FixedPool) -> None:
    lead = FixedPool("decode", decode.replicas, decode.min, decode.max, decode.scale)
    wanted = fixed_replicas(pool, lead)
    assert pool.min <= wanted <= pool.max
    again = FixedPool(pool.role, pool.replicas, pool.min, pool.max, wanted)
    settled = FixedPool("decode", lead.replicas, lead.min, lead.max, fixed_replicas(lead))
    assert fixed_replicas(again, settled) == wanted


def test_a_write_to_scale_of_a_colocated_pool_is_taken_back() -> None:
    serving = Serving(pools=[{"name": "main", "replicas": 2, "autoscaling": {"mode": "fixed", "min": 1, "max": 4}}])
    serving.checkpoint(10)
    serving.rest()
    assert (serving.status["ready"], len(serving.engines())) == ("2/2", 2)
    serving.cluster.change_spec(POOL, lambda spec: spec.update(replicas=4))
    serving.rest()
    assert (serving.status["ready"], len(serving.engines())) == ("2/2", 2)
    assert serving.condition("AutoscalingLimited") == "absent"
