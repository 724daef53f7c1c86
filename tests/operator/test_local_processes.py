"""Pods as real processes: started, stopped, killed, and never left behind."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from stoker.operator.cluster.local.process import Command, Process, ProcessExit, ShimRunner, StartError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc and subreapers are Linux's")


def command(folder: Path, code: str, **environment: str) -> Command:
    own = {"PATH": os.environ["PATH"], **environment}
    return Command([sys.executable, "-S", "-c", code], own, folder, folder / "log")


def run(story: Callable[[ShimRunner], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story(ShimRunner()))


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def until(check: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.01)


async def family(process: Process, folder: Path) -> list[int]:
    """Return the pids that a pod's processes wrote to its log, once there are three."""
    await until(lambda: (folder / "log").read_text().count("\n") >= 3)
    return [int(line) for line in (folder / "log").read_text().split()]


FAMILY = """
import os, time, subprocess, sys
print(os.getpid(), flush=True)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0) if {orphan} else time.sleep(600)
time.sleep(600)
"""


def test_output_exit_code_and_environment_arrive(tmp_path: Path) -> None:
    async def story(runner: ShimRunner) -> None:
        code = "import os, sys; print(os.environ['X'], os.getcwd()); print('err', file=sys.stderr); sys.exit(64)"
        process = await runner.start(command(tmp_path, code, X="1"))
        assert await process.wait() == ProcessExit(64)
        assert sorted((tmp_path / "log").read_text().splitlines()) == [f"1 {tmp_path}", "err"]

    run(story)


def test_a_program_that_is_not_there_says_so(tmp_path: Path) -> None:
    async def story(runner: ShimRunner) -> None:
        with pytest.raises(StartError, match="no-such-program: No such file or directory"):
            await runner.start(Command(["no-such-program"], {"PATH": "/bin"}, tmp_path, tmp_path / "log"))
        with pytest.raises(StartError, match="nowhere"):
            await runner.start(Command(["true"], {"PATH": "/bin"}, tmp_path / "nowhere", tmp_path / "log"))

    run(story)


def test_sigterm_reaches_the_main_process_alone_and_its_exit_code_counts(tmp_path: Path) -> None:
    async def story(runner: ShimRunner) -> None:
        handler = "signal.signal(15, lambda *_: sys.exit(78))"
        code = f"import signal, sys, time; {handler}; print('up', flush=True); time.sleep(600)"
        process = await runner.start(command(tmp_path, code))
        await until(lambda: "up" in (tmp_path / "log").read_text())
        process.terminate()
        assert await process.wait() == ProcessExit(78)

    run(story)


def test_a_signal_is_reported_as_a_container_runtime_does(tmp_path: Path) -> None:
    async def story(runner: ShimRunner) -> None:
        process = await runner.start(command(tmp_path, "import os; os.kill(os.getpid(), 11)"))
        assert await process.wait() == ProcessExit(139, 11)

    run(story)


@pytest.mark.parametrize("orphan", [False, True], ids=["grandchild", "orphan in its own session"])
def test_killing_a_pod_kills_everything_below_it(tmp_path: Path, orphan: bool) -> None:
    async def story(runner: ShimRunner) -> None:
        process = await runner.start(command(tmp_path, FAMILY.format(orphan=orphan)))
        pids = await family(process, tmp_path)
        process.kill()
        assert await process.wait() == ProcessExit(137, 9)
        assert not [pid for pid in pids if lives(pid)]

    run(story)


def test_nothing_outlives_the_main_process(tmp_path: Path) -> None:
    async def story(runner: ShimRunner) -> None:
        process = await runner.start(command(tmp_path, FAMILY.format(orphan=True)))
        pids = await family(process, tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        assert (await process.wait()).signal == 9
        assert not [pid for pid in pids if lives(pid)]

    run(story)


def test_a_killed_shim_takes_its_pod_along(tmp_path: Path) -> None:
    async def story(runner: ShimRunner) -> None:
        process = await runner.start(command(tmp_path, "import time; time.sleep(600)"))
        os.kill(parent(process.pid), signal.SIGKILL)
        assert await process.wait() == ProcessExit(137, 9)
        await until(lambda: not lives(process.pid))

    run(story)


SUPERVISOR = """
import asyncio, os, sys, time
from pathlib import Path
from stoker.operator.cluster.local.process import Command, ShimRunner
async def main():
    folder = Path(sys.argv[1])
    argv = [sys.executable, '-S', '-c', sys.argv[2]]
    await ShimRunner().start(Command(argv, dict(os.environ), folder, folder / 'log'))
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_pods_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path), FAMILY.format(orphan=True)])
    log = tmp_path / "log"

    async def story() -> None:
        await until(lambda: log.exists() and log.read_text().count("\n") >= 3)
        pids = [int(line) for line in log.read_text().split()]
        assert all(lives(pid) for pid in (pids[0], pids[2]))
        supervisor.kill()
        await until(lambda: not [pid for pid in pids if lives(pid)])

    try:
        asyncio.run(story())
    finally:
        supervisor.kill()
        supervisor.wait()


def test_a_pod_starts_with_little_work(tmp_path: Path) -> None:
    """The limit is processor time, so that other work on this machine does not count."""

    async def story(runner: ShimRunner) -> None:
        took = []
        for _ in range(5):
            start_s = children_s()
            process = await runner.start(Command(["true"], {"PATH": os.environ["PATH"]}, tmp_path, tmp_path / "log"))
            await process.wait()
            took.append(children_s() - start_s)
        assert 0 < min(took) < 0.5

    run(story)


def children_s() -> float:
    """Processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
