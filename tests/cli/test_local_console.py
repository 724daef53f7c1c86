"""The console beside `stoker local apply --ui`: a real gateway process, found by its log, ended with the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from stoker.cli.local import local
from stoker.cli.local_console import console_beside, has_browser, start_gateway, stop, wait_for_address
from stoker.operator.cluster.local.folders import StateFolders


def test_the_console_is_served_while_the_block_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = StateFolders(tmp_path)
    folders.make()
    with console_beside(folders, "default"):
        address, _, key = capsys.readouterr().out.removeprefix("console: ").strip().partition("#key=")
        assert key == (tmp_path / "gateway.key").read_text()
        page = httpx.get(address, trust_env=False, timeout=60)
        assert (page.status_code, "<title>Stoker</title>" in page.text) == (200, True)
    with pytest.raises(httpx.ConnectError):
        httpx.get(address, trust_env=False, timeout=60)


def test_a_gateway_that_ends_is_told_and_stops_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("error: no socket\n")
    assert wait_for_address(log, lambda: False) is None
    log.write_text("INFO the gateway listens on http://127.0.0.1:4711\n")
    assert wait_for_address(log, lambda: True) == "http://127.0.0.1:4711"


def test_nothing_starts_without_the_option(tmp_path: Path) -> None:
    with console_beside(StateFolders(tmp_path), "default", wanted=False):
        assert list(tmp_path.iterdir()) == []


def test_a_browser_needs_a_person_and_a_screen() -> None:
    assert has_browser({"DISPLAY": ":0"}, "linux", terminal=True)
    assert has_browser({}, "darwin", terminal=True)
    assert not has_browser({}, "linux", terminal=True)
    assert not has_browser({"DISPLAY": ":0"}, "linux", terminal=False)


def test_the_option_refuses_what_would_end_it_at_once() -> None:
    for others in (["--detach"], ["--json"]):
        found = CliRunner().invoke(local, ["apply", "-f", "x.yaml", "--ui", *others])
        assert (found.exit_code, "--ui serves while this command runs" in found.output) == (2, True)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the child of a killed parent on Linux alone")
def test_a_killed_command_leaves_no_gateway(tmp_path: Path) -> None:
    folders = StateFolders(tmp_path)
    folders.make()
    script = (
        "import os, sys; from pathlib import Path; from stoker.cli.local_console import start_gateway\n"
        "from stoker.operator.cluster.local.folders import StateFolders\n"
        f"child = start_gateway(StateFolders(Path({str(tmp_path)!r})), 'default', Path({str(tmp_path / 'log')!r}))\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    pid = int(found.stdout)
    assert wait_until_gone(pid)


def wait_until_gone(pid: int) -> bool:
    """Whether a process has ended, or is a zombie that its new parent has not fetched; waits for it."""
    import time

    for _ in range(1200):
        status = Path(f"/proc/{pid}/stat")
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_stop_ends_a_gateway(tmp_path: Path) -> None:
    folders = StateFolders(tmp_path)
    folders.make()
    child = start_gateway(folders, "default", tmp_path / "log")
    stop(child)
    assert child.poll() is not None
