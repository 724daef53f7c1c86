"""`stoker local apply --ui`: the gateway with its console beside the command, for as long as the command runs.

Starts `python -m stoker.gateway` as a child and ends it. The key reaches the browser in the address's fragment, which
no server sees.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import click

from stoker.cli.local_gateway import write_gateway_files
from stoker.cli.programs import program_environment
from stoker.operator.cluster.local.folders import StateFolders

LISTENS = re.compile(r"the gateway listens on (http://\S+)")
START_S = 60.0
STOP_S = 10.0
LOOK_S = 0.05
PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def console_beside(folders: StateFolders, namespace: str, *, wanted: bool = True) -> Iterator[None]:
    """Serve the console while the block runs, and print its address; do nothing where it is not `wanted`.

    A console that does not start is reported and stops nothing.
    """
    if not wanted:
        yield
        return
    log = folders.root / "gateway.log"
    child = start_gateway(folders, namespace, log)
    try:
        address = wait_for_address(log, lambda: child.poll() is None)
        if address is None:
            click.echo(f"the console did not start: {log}", err=True)
        else:
            url = f"{address}/console/#key={(folders.root / 'gateway.key').read_text().strip()}"
            click.echo(f"console: {url}")
            if has_browser(os.environ, sys.platform, terminal=sys.stdout.isatty()):
                webbrowser.open(url)
        yield
    finally:
        stop(child)


def start_gateway(folders: StateFolders, namespace: str, log: Path) -> subprocess.Popen[bytes]:
    """Start the gateway on a free port of this machine; it ends with this process."""
    config = write_gateway_files(folders, "127.0.0.1", 0, namespace, None)
    command = [sys.executable, "-m", "stoker.gateway", "--config", str(config)]
    with log.open("wb") as stream:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True,
            env=program_environment(os.environ), preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )  # fmt: skip


def wait_for_address(log: Path, alive: Callable[[], bool], longest_s: float = START_S) -> str | None:
    """The address that the gateway wrote to its log; None where it ended, or wrote none in time."""
    until = time.monotonic() + longest_s
    while time.monotonic() < until:
        running = alive()
        found = LISTENS.search(log.read_text(errors="replace"))
        if found:
            return found[1]
        if not running:
            return None
        time.sleep(LOOK_S)
    return None


def has_browser(environment: Mapping[str, str], platform: str, *, terminal: bool) -> bool:
    """Whether a window can be opened: a person is there, and a screen."""
    return terminal and (platform == "darwin" or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY")))


def stop(child: subprocess.Popen[bytes]) -> None:
    """End the gateway."""
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
