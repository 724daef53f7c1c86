"""The supervisor as a process, through the command line: it applies, shows and stops, and leaves nothing behind."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from testing.operator.terminal import PODS, Terminal, as_user, manifests, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="loopback addresses and /proc are Linux's")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path)
    yield found
    found.end()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=300) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("addresses", ["loopback", "ports"])
def test_the_life_of_a_detached_cluster(terminal: Terminal, addresses: str) -> None:
    out = terminal.run("apply", "-f", str(terminal.file), "--addresses", addresses, "--detach")
    assert "pod/web-0 created" in out
    until(lambda: terminal.running() == ["web-0", "web-1"])
    facts = terminal.json("status")
    assert facts["addresses"] == addresses
    other = "ports" if addresses == "loopback" else "loopback"
    refused = terminal.run("apply", "-f", str(terminal.file), "--addresses", other, "--detach", code=64)
    assert f"error: --addresses {other}: {terminal.state} keeps {addresses}" in refused
    assert facts["detached"] is True
    assert facts["pods"] == PODS
    assert fetch(facts["endpoints"]["default/web:80"]) == "hello"
    assert "web-1" in terminal.run("get", "po")
    assert terminal.run("logs", "web-0") == "serving hello\n"
    assert "phase: Running" in terminal.run("describe", "pod", "web-0")
    assert "phase: Running" in terminal.run("describe", "pod/web-0")
    assert "web-0" in terminal.run("get", "pod/web-0")
    assert [line.split()[0] for line in terminal.run("get").splitlines()] == ["NAME", "web-0", "web-1"]
    assert "'web-1' is no KIND/NAME" in terminal.run("describe", "pod/web-0", "web-1", code=64)
    assert "web-1" in terminal.run("describe", "pod"), "without a name all of a kind"
    assert "pod/web-0 unchanged" in terminal.run("apply", "-f", str(terminal.file), "--detach")
    assert terminal.run("delete", "pod", "web-0") == "pod/web-0 deleted\n"
    assert "does not exist" in terminal.run("delete", "pod/web-0", code=1)
    assert fetch(facts["endpoints"]["default/web:80"]) == "hello"
    terminal.run("down")
    assert terminal.processes() == []
    assert "no supervisor runs" in terminal.run("status", code=1)
    assert terminal.state.stat().st_mode & 0o777 == 0o700


def test_the_gateway_of_a_running_cluster(terminal: Terminal) -> None:
    assert "no supervisor runs" in terminal.run("gateway", code=1)
    terminal.run("apply", "-f", str(terminal.file), "--detach")
    with terminal.start("gateway", "--port", "0") as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        address = next(line.rpartition(" ")[2].strip() for line in lines if "listens on http://" in line)
        key = (terminal.state / "gateway.key").read_text()
        assert (terminal.state / "gateway.key").stat().st_mode & 0o777 == 0o600
        nodes = httpx.get(f"{address}/v1/cluster/nodes", headers={"Authorization": f"Bearer {key}"}, timeout=300)
        assert [node["status"] for node in nodes.json()] == ["Ready"]
        assert httpx.get(f"{address}/v1/cluster/nodes", timeout=300).status_code == 401
        process.terminate()
        assert process.wait(timeout=300) == 0
    terminal.run("down")


def test_a_state_folder_that_cannot_be_is_named(terminal: Terminal) -> None:
    terminal.state.write_text("")
    refused = terminal.run("apply", "-f", str(terminal.file), code=1)
    assert refused == f"error: state folder {terminal.state}: {terminal.state}/pods: Not a directory\n"


def test_the_socket_belongs_to_its_user_and_the_state_survives(terminal: Terminal) -> None:
    terminal.run("apply", "-f", str(terminal.file), "--detach")
    assert (terminal.state / "supervisor.sock").stat().st_mode & 0o777 == 0o600
    uid = terminal.json("get", "cm", "web")["metadata"]["uid"]
    os.kill(terminal.supervisor(), signal.SIGKILL)
    until(lambda: terminal.processes() == [])
    terminal.run("apply", "-f", str(terminal.file), "--detach")
    assert terminal.json("get", "cm", "web")["metadata"]["uid"] == uid
    until(lambda: {pod["status"]["phase"] for pod in terminal.json("get", "pods")["items"]} == {"Failed"})
    terminal.run("down", "--purge")
    assert not terminal.state.exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["Ctrl-C", "SIGTERM", "SIGKILL"])
def test_an_attached_cluster_ends_with_its_terminal(terminal: Terminal, how: signal.Signals) -> None:
    process = terminal.start("apply", "-f", str(terminal.file))
    until(terminal.state.exists)
    until(lambda: (terminal.state / "supervisor.sock").exists())
    until(lambda: terminal.running() == ["web-0", "web-1"])
    process.send_signal(how)
    process.communicate(timeout=300)
    assert process.returncode == {signal.SIGINT: 130}.get(how, -how)
    until(lambda: terminal.processes() == [])


def test_one_supervisor_per_state_folder(terminal: Terminal) -> None:
    terminal.run("apply", "-f", str(terminal.file), "--detach")
    pid = terminal.supervisor()
    command = [sys.executable, "-m", "stoker.operator.service.local.run_supervisor"]
    second = subprocess.run(
        [*command, "--state", str(terminal.state), "--addresses", "loopback"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 75
    assert f"belongs to a running supervisor (pid {pid})" in second.stderr
    terminal.run("down")


def test_refused_manifests_leave_nothing_running(terminal: Terminal) -> None:
    bad = manifests()[-1]
    bad["spec"]["initContainers"] = [{"name": "first"}]
    terminal.file.write_text(yaml.safe_dump(bad))
    out = terminal.run("apply", "-f", str(terminal.file), code=64)
    assert "pod/web-1 refused: Pod web-1: not supported yet: spec.initContainers" in out
    assert terminal.processes() == []


def test_a_deep_state_folder_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    terminal = Terminal(deep)
    terminal.run("apply", "-f", str(terminal.file), "--detach")
    until(lambda: terminal.running() == ["web-0", "web-1"])
    terminal.run("down")
    assert terminal.processes() == []


def nobody() -> int:
    return pwd.getpwnam("nobody").pw_uid


def python_for_nobody(home: Path) -> str | None:
    """Return an interpreter of this version that the user `nobody` can run and that imports the packages."""
    check = "import stoker.cli.main, stoker.operator.service.local.main"
    for python in (sys.executable, shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")):
        try:
            if (
                python
                and not subprocess.run(
                    [python, "-c", check], capture_output=True, check=False, **as_user(nobody(), home)
                ).returncode
            ):
                return python
        except OSError:
            continue
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_it_needs_no_rights() -> None:
    folder = Path(tempfile.mkdtemp(prefix="stoker-nobody-"))
    os.chown(folder, nobody(), nobody())
    python = python_for_nobody(folder)
    if python is None:
        shutil.rmtree(folder)
        pytest.skip("nobody cannot read this interpreter or these packages")
    terminal = Terminal(folder, nobody(), python)
    try:
        terminal.run("apply", "-f", str(terminal.file), "--detach")
        until(lambda: terminal.running() == ["web-0", "web-1"])
        assert Path(f"/proc/{terminal.supervisor()}").stat().st_uid == nobody()
        assert fetch(terminal.json("status")["endpoints"]["default/web:80"]) == "hello"
        terminal.run("down")
        assert terminal.processes() == []
    finally:
        terminal.end()
        shutil.rmtree(folder)
