"""Settings and fixtures of all tests."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from stoker.pod.collection import imports
from testing.fixed_cases import draw_from_tests_alone
from testing.model.interpreted import Interpreted
from testing.time_limit import raise_out_of_time

BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # others share the CPU
settings.register_profile("fixed", BUSY, derandomize=True)
settings.register_profile("random", BUSY)
settings.load_profile("fixed")


@pytest.hookimpl(trylast=True)  # after the option has chosen a profile
def pytest_configure() -> None:
    """Judge each run by the same cases, unless `--hypothesis-profile=random` asks for new ones."""
    if settings.get_current_profile_name() == "fixed":
        draw_from_tests_alone()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while all files are imported, and leave what they made out of later collections."""
    with imports():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Generator[None, object, object]:
    """Tell a test that takes too long from one that fails."""
    is_set = yield
    raise_out_of_time()
    return is_set


def pytest_runtest_setup() -> None:
    """Let what a test draws from torch depend on the test alone, not on which others the process ran before."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def threads_as_before() -> Iterator[None]:
    """Give torch its number of threads back after each file: an engine that loads here sets its own.

    The order of torch's sums depends on that number, so a file that left it changed would change the bits of the next.
    """
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 0
    yield
    if torch:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreted]:
    """Processes that interpret kernels, for all files of a run."""
    processes = Interpreted()
    yield processes
    processes.close()
