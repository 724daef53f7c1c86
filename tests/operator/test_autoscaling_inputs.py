"""What the autoscaler's rule is fed: histograms, step curves, demand, forecasts, windows of counters."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.autoscaling.demand import Demand, burstiness, forecast_rate
from stoker.operator.domain.autoscaling.load_report import LoadCounts, read_load
from stoker.operator.domain.autoscaling.load_window import LoadWindow, stale
from stoker.operator.domain.autoscaling.prediction import EngineShape, Goals, predict
from stoker.operator.domain.autoscaling.step_curve import CurveSums, StepCurve, fit_curve
from stoker.pod.histogram import Histogram, merged
from testing.operator.engine_load import load, report

SHAPE = EngineShape(kv_tokens=400_000, max_requests=128, max_batch_tokens=4096)


# Histograms


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-5, 1e6), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_quantiles_and_means_are_right_within_a_bucket(values: list[float], share: float) -> None:
    found = Histogram()
    for value in values:
        found.add(value)
    exact = sorted(values)[max(math.ceil(share * len(values) - 1e-9) - 1, 0)]
    assert exact * 0.999 <= (found.quantile(share) or 0) <= exact * 1.101
    assert found.moment() == pytest.approx(sum(values) / len(values), rel=0.06)
    assert Histogram.from_wire(found.to_wire()) == found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), max_size=20), st.lists(st.floats(1e-3, 1e3), max_size=20))
def test_the_difference_of_two_reports_is_what_happened_between(first: list[float], second: list[float]) -> None:
    early, late, between = Histogram(), Histogram(), Histogram()
    for value in first:
        early.add(value)
        late.add(value)
    for value in second:
        late.add(value)
        between.add(value)
    assert late.since(early) == between
    assert merged((early, between)).counts == late.counts


# Step curves


def steps(curve: StepCurve, number: int, prompt: int, decode: int, noise: float = 1.0) -> LoadCounts:
    """Counters of `number` steps with so many tokens in all."""
    busy_s = noise * (number * curve.base_s + prompt * curve.prompt_token_s + decode * curve.decode_token_s)
    return LoadCounts(generated=decode, steps=number, step_tokens=prompt + decode, busy_s=busy_s)


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-3), st.integers(0, 10_000))
def test_a_curve_is_found_again_from_its_counters(base: float, prompt: float, decode: float, seed: int) -> None:
    curve, chance = StepCurve(base, prompt, decode), random.Random(seed)
    sums = [CurveSums()] * 2
    for number in range(60):
        prompts = chance.randint(0, 60_000) if number % 3 else 0
        drawn = chance.randint(5, 60), prompts, chance.randint(0, 2000)
        sums[number % 2] = sums[number % 2].plus(steps(curve, *drawn, chance.uniform(0.99, 1.01)))
    found = fit_curve(sums)
    assert found is not None
    for tokens, decodes in ((0, 20), (1000, 20), (500, 5)):
        assert found.step_s(tokens, decodes) == pytest.approx(curve.step_s(tokens, decodes), rel=0.15)


def test_a_curve_needs_steps_and_has_no_negative_cost() -> None:
    assert fit_curve([CurveSums().plus(steps(StepCurve(0.1, 0, 0), 19, 0, 19))]) is None
    assert fit_curve([]) is None
    same = CurveSums()
    for _ in range(5):
        same = same.plus(steps(StepCurve(0.01, 1e-4, 1e-3), 100, 5000, 800))
    found = fit_curve([same])
    assert found is not None, "samples that do not differ give a curve through them"
    assert 100 * found.base_s + 5000 * found.prompt_token_s + 800 * found.decode_token_s == pytest.approx(2.3)
    falling = CurveSums()
    for tokens in range(100, 1000, 100):
        falling = falling.plus(LoadCounts(generated=tokens, steps=10, step_tokens=tokens, busy_s=1 - tokens / 2000))
    found = fit_curve([falling])
    assert found is not None
    assert min(found.base_s, found.prompt_token_s, found.decode_token_s) >= 0


# Predictions


@settings(max_examples=80, deadline=None)
@given(st.floats(0.1, 50), st.integers(1, 20), st.sampled_from([2.0, 80.0, 400.0]))
def test_more_replicas_are_never_slower(rate: float, replicas: int, output: float) -> None:
    prompts = Histogram()
    for size in (100, 900, 1500, 3000):
        prompts.add(size)
    demand = Demand(rate, 1.5, prompts, prompts.moment(), output)
    curve = StepCurve(0.01, 5e-5, 2e-4)
    fewer, more = (predict(demand, curve, SHAPE, count) for count in (replicas, replicas + 1))
    assert more.first_token_s <= fewer.first_token_s * 1.001
    assert more.gap_s <= fewer.gap_s * 1.001
    assert more.kv_use <= fewer.kv_use


def test_a_pool_without_room_for_its_sequences_does_not_fit() -> None:
    prompts = Histogram()
    prompts.add(1000)
    demand = Demand(5.0, 1.0, prompts, 1000, 300)
    curve = StepCurve(0.02, 1e-5, 1e-5)
    assert predict(demand, curve, SHAPE, 1).fits
    assert not predict(demand, curve, replace(SHAPE, kv_tokens=10_000), 1).fits
    assert not predict(demand, curve, replace(SHAPE, max_requests=8), 1).fits
    assert predict(demand, curve, replace(SHAPE, max_requests=8), 8).fits


def test_a_gap_that_full_steps_keep_needs_no_room_for_more_load() -> None:
    prompts = Histogram()
    prompts.add(8000)
    shape = replace(SHAPE, max_batch_tokens=2048)
    found = predict(Demand(2.0, 1.0, prompts, 8000, 300), StepCurve(0.015, 8e-5, 1e-4), shape, 3)
    assert 0.17 < found.gap_s <= found.full_step_s < 0.19
    assert found.used(Goals(gap_s=0.2)) == found.step_s / 0.2 < 0.2
    assert found.used(Goals(gap_s=0.15)) == found.gap_s / 0.15 > 1


def test_small_steps_shorten_gaps_and_lengthen_long_prompts() -> None:
    """An engine that takes 512 prompt tokens beside decodes, and more only where more wait."""
    prompts = Histogram()
    prompts.add(1000)
    demand, curve = Demand(12.0, 1.0, prompts, 1000, 300), StepCurve(0.015, 8e-5, 1e-4)
    full = predict(demand, curve, replace(SHAPE, max_batch_tokens=2048), 3)
    small = predict(demand, curve, replace(SHAPE, max_batch_tokens=2048, mixed_tokens=512), 3)
    assert full.gap_s > 0.09 > 0.07 > small.gap_s > small.step_s
    assert 0 < small.first_token_s - full.first_token_s < 0.03  # one step more
    assert (small.busy, small.sequences, small.full_step_s) == (full.busy, full.sequences, full.full_step_s)
    assert predict(demand, curve, replace(SHAPE, max_batch_tokens=2048, mixed_tokens=4096), 3) == full


# Forecasts


def test_a_rise_beyond_chance_is_extrapolated_and_chance_is_not() -> None:
    ramp = [10 + 20 * number for number in range(60)]
    current = sum(ramp[-6:]) / 30
    assert forecast_rate(ramp, 5.0, 0.0) == pytest.approx(current)
    assert current * 1.05 < forecast_rate(ramp, 5.0, 120.0) <= 2 * current
    chance = random.Random(1)
    steady = [sum(chance.random() < 0.01 for _ in range(1000)) for _ in range(60)]
    assert forecast_rate(steady, 5.0, 120.0) == pytest.approx(2.0, rel=0.35)


def test_a_burst_is_not_extrapolated_like_a_ramp() -> None:
    bursts = ([0] * 20 + [100, 300, 500, 400, 200, 100]) * 2
    current = sum(bursts[-6:]) / 30
    assert burstiness(bursts) == 10.0
    assert current < forecast_rate(bursts, 5.0, 120.0) <= 1.1 * current


def test_a_peak_of_the_last_minutes_counts() -> None:
    peak = [5] * 20 + [50] * 18 + [5] * 22
    assert forecast_rate(peak, 5.0, 0.0) == 10.0
    assert forecast_rate([], 5.0, 60.0) == 0.0


def test_burstiness_is_that_of_the_counts_and_a_ramp_has_none() -> None:
    assert burstiness([7, 8, 9, 10, 11, 12]) == 1.0
    assert burstiness([0, 0, 30, 0, 0, 30, 0, 0]) > 5
    assert burstiness([]) == burstiness([0] * 10) == 1.0


# Reports and windows


@pytest.mark.parametrize(
    "status",
    [{}, {"load": None}, {"load": {}}, {"load": load(1, 1, prompt={"x": 1})}, {"load": load(1, 1, steps="many")}],
    ids=["no load", "not yet", "empty", "a strange bucket", "no number"],
)
def test_a_load_of_another_form_is_unknown(status: dict[str, Any]) -> None:
    assert read_load(status) is None


def test_a_window_tells_rate_sizes_times_and_steps_of_all_engines() -> None:
    window = LoadWindow()
    for second in range(0, 300, 2):
        for engine in ("a", "b"):
            window.record(1000.0 + second, engine, report(second, second // 2))
    assert window.rate(1300.0) == pytest.approx(2.0)
    demand = window.demand(1300.0, 60.0)
    assert demand is not None
    assert demand.rate == pytest.approx(2.0, rel=0.1)
    assert demand.burstiness == pytest.approx(1.0, abs=0.3)
    assert demand.uncached.moment() == pytest.approx(800, rel=0.06)
    assert demand.output == pytest.approx(50, rel=0.06)
    curve = window.curve()
    assert curve is not None
    assert 50 * curve.base_s + 800 * curve.prompt_token_s + 49 * curve.decode_token_s == pytest.approx(0.5498, rel=0.01)
    measured = window.measured(1300.0)
    assert measured.first_token_s == pytest.approx(0.4, rel=0.1)
    assert measured.gap_s == pytest.approx(0.02, rel=0.1)
    assert window.shape == EngineShape(64_000, 64, 2048)


def test_an_engine_that_begins_anew_or_leaves_takes_nothing_back() -> None:
    window = LoadWindow()
    for second in range(0, 60, 2):
        window.record(float(second), "a", report(second, second))
    window.record(60.0, "a", report(1, 0))
    window.record(62.0, "a", report(5, 2))
    assert window.rate(65.0) == pytest.approx((24 + 4) / 30)
    window.forget(["b"])
    assert window.age_s("a", 65.0) is None
    assert window.rate(65.0) > 0


def test_no_requests_are_a_measured_zero_and_silence_is_unknown() -> None:
    window = LoadWindow()
    assert stale(window, "a", "chat-0", 0.0, 10.0) is None, "it has had no time to report"
    assert stale(window, "a", "chat-0", 0.0, 16.0) == "engine chat-0 has reported no load for 16 s"
    window.record(20.0, "a", report(7, 7))
    assert stale(window, "a", "chat-0", 0.0, 30.0) is None
    assert stale(window, "a", "chat-0", 0.0, 36.0) == "the load of engine chat-0 is 16 s old"
    for second in range(22, 400, 2):
        window.record(float(second), "a", report(7, 7))
    demand = window.demand(400.0, 60.0)
    assert demand is not None
    assert demand.rate == 0.0
