"""The command line's side of the supervisor: broken answers, and a lock that shows whether one runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stoker.cli import supervisor_client
from stoker.cli.local import local
from stoker.cli.supervisor_client import NoAnswer, NotRunning, SupervisorClient, SupervisorError
from stoker.operator.cluster.local.folders import StateFolders
from stoker.operator.cluster.local.socket_path import short_path
from stoker.operator.cluster.local.state_lock import (
    StateFolderReplaced,
    StateFolderTaken,
    holder_pid,
    is_held,
    lock_state,
)


@pytest.fixture
def folders(tmp_path: Path) -> StateFolders:
    found = StateFolders(tmp_path / "state")
    found.make()
    return found


@contextlib.contextmanager
def supervisor_that_answers(folders: StateFolders, answer: bytes) -> Iterator[None]:
    """A holder of the folder that sends every caller the same bytes; without bytes it sends nothing."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_path(folders.socket) as path:
        listener.bind(path)
    listener.listen()
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            if answer:
                connection.recv(65536)
                connection.sendall(answer)
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        with lock_state(folders):
            yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
        for connection in held:
            connection.close()


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (b"HTTP/1.1 500 X\r\nContent-Length: 21\r\n\r\nInternal Server Error", "'Internal Server Error'"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 0\r\n\r\n", "HTTP 502: ''"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{\"p", "HTTP 200"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "HTTP 200: '[]'"),
    ],
    ids=["500 as text", "nothing", "half an answer", "a list"],
)  # fmt: skip
def test_an_answer_that_is_no_json_is_an_error_with_its_text(folders: StateFolders, answer: bytes, shown: str) -> None:
    with supervisor_that_answers(folders, answer):
        with pytest.raises(SupervisorError, match="the supervisor answered HTTP") as failed:
            SupervisorClient(folders.root).status()
        assert shown in str(failed.value)
        assert str(folders.supervisor_log) in str(failed.value)
        result = CliRunner().invoke(local, ["status", "--state", str(folders.root)])
        assert result.exit_code == 1
        assert "error: the supervisor answered HTTP" in result.output


def test_an_error_of_the_supervisor_is_its_message(folders: StateFolders) -> None:
    body = b'{"error": "no kind"}'
    answer = b"HTTP/1.1 500 X\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with supervisor_that_answers(folders, answer), pytest.raises(SupervisorError, match=r"^no kind$"):
        SupervisorClient(folders.root).status()


def test_a_supervisor_that_is_silent_runs_all_the_same(folders: StateFolders) -> None:
    client = SupervisorClient(folders.root, timeout_s=0.2)
    with supervisor_that_answers(folders, b""):
        with pytest.raises(NoAnswer, match=rf"a supervisor \(pid {os.getpid()}\) holds .* but does not answer"):
            client.status()
        with pytest.raises(NoAnswer):
            client.running()


def test_without_a_socket_the_lock_knows_whether_one_runs(
    folders: StateFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_client, "SOCKET_PATIENCE_S", 0.2)
    client = SupervisorClient(folders.root)
    with lock_state(folders):
        with pytest.raises(NoAnswer):
            client.status()
        result = CliRunner().invoke(local, ["down", "--purge", "--state", str(folders.root)])
        assert result.exit_code == 1
        assert "nothing was deleted" in result.output
        assert folders.root.exists()
        file = folders.root / "one.yaml"
        file.write_text("{apiVersion: v1, kind: ConfigMap, metadata: {name: one}}")
        result = CliRunner().invoke(local, ["apply", "-f", str(file), "--detach", "--state", str(folders.root)])
        assert (result.exit_code, "does not answer" in result.output) == (1, True)
        for words in (["get", "tj"], ["plot", "one"], ["gateway"]):
            result = CliRunner().invoke(local, [*words, "--state", str(folders.root)])
            assert (result.exit_code, "starts one" in result.output) == (1, False), result.output
    with pytest.raises(NotRunning, match="--state names another state folder, stoker local apply -f FILE starts one"):
        client.status()
    assert not client.running()
    assert CliRunner().invoke(local, ["down", "--purge", "--state", str(folders.root)]).exit_code == 0
    assert not folders.root.exists()


def test_a_state_folder_without_space_for_the_log_is_named(
    folders: StateFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(SupervisorError, match=r"supervisor\.log: No space left on device"):
        SupervisorClient(folders.root).start("ports", attached=True)


def test_a_folder_that_is_no_state_is_not_purged(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    result = CliRunner().invoke(local, ["down", "--purge", "--state", str(tmp_path)])
    assert result.exit_code == 64
    assert "is not a state folder" in result.output
    assert (tmp_path / "mine").exists()


def test_a_failed_first_apply_takes_the_supervisor_down_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds with --detach: after an error, no background process may be left."""
    calls: list[str] = []

    def fail(*_: Any, **__: Any) -> None:
        raise SupervisorError("the supervisor answered HTTP 500")

    monkeypatch.setattr(SupervisorClient, "start", lambda *_, **__: calls.append("start"))
    monkeypatch.setattr(SupervisorClient, "apply", fail)
    monkeypatch.setattr(SupervisorClient, "down", lambda *_: calls.append("down"))
    file = tmp_path / "one.yaml"
    file.write_text("{apiVersion: v1, kind: ConfigMap, metadata: {name: one}}")
    words = ["apply", "-f", str(file), "--detach", "--state", str(tmp_path / "state")]
    result = CliRunner().invoke(local, words)
    assert (result.exit_code, calls) == (1, ["start", "down"])
    assert "error: the supervisor answered HTTP 500" in result.output


# The lock


def test_one_process_holds_a_folder(folders: StateFolders) -> None:
    assert not is_held(folders)
    with lock_state(folders):
        assert is_held(folders)
        assert holder_pid(folders) == os.getpid()
        with (
            pytest.raises(StateFolderTaken, match=rf"running supervisor \(pid {os.getpid()}\)"),
            lock_state(folders, patience_s=0),
        ):
            pass
    assert not is_held(folders)


def test_a_deleted_lock_file_frees_nothing_and_is_made_anew(folders: StateFolders) -> None:
    with lock_state(folders) as lock:
        folders.lock.unlink()
        assert is_held(folders)
        if Path("/proc/locks").exists():
            assert holder_pid(folders) in (os.getpid(), None)  # a container may show no locks
        with pytest.raises(StateFolderTaken), lock_state(folders, patience_s=0):
            pass
        lock.check()
        assert holder_pid(folders) == os.getpid()
        folders.lock.unlink()
        folders.lock.touch()
        lock.check()
        assert holder_pid(folders) == os.getpid()


def test_the_holder_notices_that_its_folder_was_replaced(folders: StateFolders) -> None:
    with lock_state(folders) as lock:
        lock.check()
        folders.root.rename(folders.root.with_name("aside"))
        with pytest.raises(StateFolderReplaced, match="deleted or replaced"):
            lock.check()
        folders.make()
        with pytest.raises(StateFolderReplaced, match="deleted or replaced"):
            lock.check()
        shutil.rmtree(folders.root)


def test_a_supervisor_of_an_earlier_version_holds_the_file_alone(folders: StateFolders) -> None:
    lock = "f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX)"
    code = f"import fcntl, sys; {lock}; print('held', flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folders.lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert is_held(folders)
        with pytest.raises(StateFolderTaken), lock_state(folders, patience_s=0):
            pass
    finally:
        process.communicate("\n", timeout=240)
    assert not is_held(folders)


def test_who_only_asks_keeps_no_supervisor_from_starting(folders: StateFolders) -> None:
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            is_held(folders)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(20):
            with lock_state(folders, patience_s=60):
                pass
    finally:
        stop.set()
        thread.join()
