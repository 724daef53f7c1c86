"""Figures of a pod's GPUs: what the driver gives, for the GPUs that the pod sees; none and no cost without a driver."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stoker.pod.gpu_metrics import GpuMetrics, Read, gpu_metrics
from stoker.pod.gpu_reading import GpuReader, GpuReading, load_nvml
from testing.pod.nvml import FakeGpu, FakeNvml

GIB = 1 << 30
PATIENCE_S = 60.0
"""Longest wait for a thread on a busy machine."""
GPUS = [
    FakeGpu("GPU-a1", "00000000:1B:00.0", busy=75, used=20 * GIB),
    FakeGpu("GPU-b2", "00000000:43:00.0", busy=None, used=10 * GIB),
    FakeGpu("GPU-c3", "00000000:52:00.0", lost=True),
    FakeGpu("GPU-d4", "00000000:9D:00.0", busy=5, used=None),
]


def samples(read: Read) -> dict[tuple[str, str], float]:
    """(metric without its prefix, UUID) -> value, of one scrape."""
    registry = CollectorRegistry()
    registry.register(GpuMetrics(read, PATIENCE_S))
    text = generate_latest(registry).decode()
    return {
        (sample.name.removeprefix("stoker_gpu_"), sample.labels["uuid"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_each_gpu_has_the_figures_that_the_driver_gives() -> None:
    assert samples(GpuReader(lambda: FakeNvml(GPUS), None).read) == {
        ("utilization_ratio", "GPU-a1"): 0.75,
        ("memory_used_bytes", "GPU-a1"): 20 * GIB,
        ("memory_total_bytes", "GPU-a1"): 80 * GIB,
        ("memory_used_bytes", "GPU-b2"): 10 * GIB,
        ("memory_total_bytes", "GPU-b2"): 80 * GIB,
        ("utilization_ratio", "GPU-d4"): 0.05,
    }


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-a1", "GPU-b2", "GPU-d4"]),
        ("0", ["GPU-a1"]),
        ("3, 1", ["GPU-b2", "GPU-d4"]),
        ("GPU-b2", ["GPU-b2"]),
        ("-1", []),
    ],
)
def test_only_the_gpus_that_the_pod_sees_are_read(visible: str | None, uuids: list[str]) -> None:
    found = GpuReader(lambda: FakeNvml(GPUS), visible).read()
    assert found is not None
    assert [gpu.uuid for gpu in found] == uuids


def test_a_pod_without_gpus_does_not_load_the_driver() -> None:
    driver = FakeNvml(GPUS)
    assert GpuReader(lambda: driver, "").read() is None
    assert driver.calls == []


def test_a_machine_without_a_driver_is_asked_once() -> None:
    asked = []

    def read() -> None:
        asked.append("read")

    metrics = GpuMetrics(read, PATIENCE_S)
    assert [list(metrics.collect()) for _ in range(3)] == [[], [], []]
    assert asked == ["read"]


def test_a_program_on_a_machine_without_a_driver_has_no_metric_of_gpus() -> None:
    assert list(gpu_metrics({"CUDA_VISIBLE_DEVICES": ""}).collect()) == []


def test_a_driver_that_does_not_answer_is_asked_once_and_later_again() -> None:
    asked, answer = [], threading.Event()

    def read() -> Sequence[GpuReading]:
        asked.append("read")
        answer.wait(PATIENCE_S)
        return [GpuReading(0, "GPU-a1", "1B", 0.5, None, None)]

    metrics = GpuMetrics(read, 0)
    assert [list(metrics.collect()) for _ in range(3)] == [[], [], []]
    assert asked == ["read"]
    answer.set()
    while not (found := list(metrics.collect())):
        time.sleep(0.001)
    assert [(family.name, [sample.value for sample in family.samples]) for family in found] == [
        ("stoker_gpu_utilization_ratio", [0.5])
    ]


def test_a_reading_that_fails_is_logged_and_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    def read() -> Sequence[GpuReading]:
        raise RuntimeError("no such call")

    metrics = GpuMetrics(read, PATIENCE_S)
    assert [list(metrics.collect()) for _ in range(2)] == [[], []]
    assert [record.getMessage() for record in caplog.records] == [
        "the figures of GPUs cannot be read, and are not tried again"
    ]


@pytest.mark.gpu
def test_a_real_driver_gives_every_figure() -> None:
    found = GpuReader(load_nvml, None).read()
    assert found
    for gpu in found:
        assert gpu.utilization is not None
        assert gpu.memory_used is not None
        assert gpu.memory_total is not None
        assert 0 <= gpu.utilization <= 1
        assert 0 < gpu.memory_used <= gpu.memory_total
