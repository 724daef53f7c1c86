"""The state folder of a real supervisor: full disk, damaged files, deleted files, a supervisor that hangs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.operator.terminal import Terminal, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="tmpfs and /proc are Linux's")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path)
    yield found
    found.end()


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def job() -> dict[str, Any]:
    """Return a job that waits for its claim for ever: it has an identity and needs no trainer."""
    model = {"architecture": "llama", "vocabSize": 512, "hiddenSize": 32, "intermediateSize": 64}
    spec = {
        "model": {**model, "numLayers": 2, "numHeads": 4},
        "workers": {"replicas": 1},
        "training": {"totalSteps": 4, "globalBatchSize": 4, "sequenceLength": 32},
        "data": {"sources": [{"name": "a", "path": "/data/*.txt"}], "tokenizer": {"kind": "train", "vocabSize": 512}},
        "checkpoint": {"storage": {"claimName": "nowhere"}, "intervalSteps": 2},
    }
    return {"apiVersion": "stoker.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "teach"}, "spec": spec}


def apply(terminal: Terminal, *objects: dict[str, Any], code: int = 0, options: tuple[str, ...] = ()) -> str:
    file = terminal.folder / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    return terminal.run("apply", "-f", str(file), "--detach", *options, code=code)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A file system of `size` bytes at `folder`."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "stoker-test", str(folder)]
    if os.geteuid() or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(file: Path) -> None:
    """Fill the disk to its last byte."""
    block = b"\0" * (1 << 20)
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as stream:
        while block:
            try:
                stream.write(block)
            except OSError:
                block = block[: len(block) // 2]


SLEEPER = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True); time.sleep(600)"
)


def ends_when_told(folder: Path) -> str:
    """A pod that ends once there is a file `end`, and leaves a file `ended`."""
    return (
        f"import pathlib, time; folder = pathlib.Path({str(folder)!r})\n"
        "while not (folder / 'end').exists(): time.sleep(0.05)\n"
        "(folder / 'ended').touch()"
    )


def pod(name: str, code: str = SLEEPER) -> dict[str, Any]:
    container = {"name": "main", "command": ["python", "-S", "-c", code]}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def phase(terminal: Terminal, name: str) -> str:
    return str(terminal.json("get", "pod", name)["status"].get("phase"))


def test_a_full_disk_is_reported_and_heals_by_itself(terminal: Terminal) -> None:
    with small_disk(terminal.state, "4m"):
        (terminal.folder / "pods.yaml").write_text(yaml.safe_dump(pod("stays")))
        apply(terminal, pod("ends", ends_when_told(terminal.folder)), pod("stays"))
        until(lambda: {phase(terminal, "ends"), phase(terminal, "stays")} == {"Running"})
        filler = terminal.state / "filler"
        fill(filler)
        refused = apply(terminal, config_map("late", text="x" * 5000), code=1)
        assert "configmap/late failed: the state folder cannot be written: " in refused
        assert "No space left on device; nothing of it was stored" in refused
        assert "does not exist" in terminal.run("get", "cm", "late", code=1)
        assert "No space left on device" in terminal.run("delete", "-f", str(terminal.folder / "pods.yaml"), code=1)
        assert "warning: the state folder cannot be written" in terminal.run("get", "pods")
        assert "No space left on device" in terminal.json("status")["problems"][0]
        (terminal.folder / "end").touch()
        until((terminal.folder / "ended").exists)
        time.sleep(2)  # the pod ends while its status cannot be written
        assert phase(terminal, "stays") == "Running"
        filler.unlink()
        until(lambda: phase(terminal, "ends") == "Succeeded")
        until(lambda: terminal.json("status")["problems"] == [])
        assert "configmap/late created" in apply(terminal, config_map("late", text="x" * 5000))
        terminal.run("down")
        assert terminal.processes() == []


def test_nothing_is_deleted_under_a_supervisor_that_does_not_answer(terminal: Terminal) -> None:
    apply(terminal, config_map("one"))
    pid = terminal.supervisor()
    os.kill(pid, signal.SIGSTOP)
    process = terminal.start("down", "--purge")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, (out, err)
    assert f"a supervisor (pid {pid}) holds {terminal.state} but does not answer" in err
    assert f"kill -9 {pid}" in err
    assert "nothing was deleted" in err
    assert (terminal.state / "objects" / "ConfigMap" / "default" / "one.json").exists()
    os.kill(pid, signal.SIGCONT)
    terminal.run("down", "--purge")
    assert not terminal.state.exists()


def test_deleted_socket_and_lock_files_let_no_second_supervisor_in(terminal: Terminal) -> None:
    apply(terminal, config_map("one"))
    pid = terminal.supervisor()
    for name in ("supervisor.sock", "supervisor.lock"):
        (terminal.state / name).unlink()
    command = [sys.executable, "-m", "stoker.operator.service.local.run_supervisor"]
    second = subprocess.run(
        [*command, "--state", str(terminal.state), "--addresses", "loopback"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert second.returncode == 75, second.stderr
    assert terminal.supervisor() == pid
    assert (terminal.state / "supervisor.sock").stat().st_mode & 0o777 == 0o600
    until(lambda: (terminal.state / "supervisor.lock").exists())
    terminal.run("down", "--purge")
    assert not terminal.state.exists()


def test_a_supervisor_ends_when_its_folder_is_replaced(terminal: Terminal) -> None:
    apply(terminal, pod("stays"))
    until(lambda: phase(terminal, "stays") == "Running")
    aside = terminal.folder / "aside"
    terminal.state.rename(aside)
    (terminal.state / "objects").mkdir(parents=True)
    until(lambda: terminal.processes() == [])
    assert list((terminal.state / "objects").iterdir()) == []
    assert "was deleted or replaced" in (aside / "supervisor.log").read_text()


def test_a_damaged_job_is_reported_and_not_made_anew_beside_its_checkpoints(terminal: Terminal) -> None:
    apply(terminal, job(), config_map("one"))
    uid = terminal.json("get", "tj", "teach")["metadata"]["uid"]
    terminal.run("down")
    file = terminal.state / "objects" / "TrainingJob" / "default" / "teach.json"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"TrainingJob"', b'"TrainingJpb"', 1))
    refused = apply(terminal, job(), config_map("one"), code=64)
    assert "trainingjob/teach refused: TrainingJob default/teach is lost: " in refused
    assert f"{file}.damaged: the checksum does not match the content" in refused
    assert "stoker local apply --recreate-lost" in refused
    assert "configmap/one unchanged" in refused
    assert "is lost" in terminal.run("get", "tj", "teach", code=1)
    assert f"warning: TrainingJob default/teach is lost: {file}.damaged" in terminal.run("get")
    assert "is lost" in terminal.run("status")
    terminal.run("down")
    file.write_bytes(content)
    apply(terminal, job())
    assert terminal.json("get", "tj", "teach")["metadata"]["uid"] == uid
    terminal.run("down")


def test_a_lost_job_is_made_anew_on_request(terminal: Terminal) -> None:
    apply(terminal, job())
    uid = terminal.json("get", "tj", "teach")["metadata"]["uid"]
    terminal.run("down")
    (terminal.state / "objects" / "TrainingJob" / "default" / "teach.json").unlink()
    assert "teach.json: the file is missing" in apply(terminal, job(), code=64)
    assert "trainingjob/teach created" in apply(terminal, job(), options=("--recreate-lost",))
    assert terminal.json("get", "tj", "teach")["metadata"]["uid"] != uid
    assert terminal.json("status")["problems"] == []
    terminal.run("down")


@pytest.mark.parametrize("name", ["addresses.json", "control-key.pem", "objects/ConfigMap/default/two.json"])
def test_one_damaged_file_does_not_keep_the_cluster_from_starting(terminal: Terminal, name: str) -> None:
    apply(terminal, config_map("one"), config_map("two"), pod("stays"))
    until(lambda: phase(terminal, "stays") == "Running")
    terminal.run("down")
    (terminal.state / name).write_text("{")
    assert "configmap/one unchanged" in apply(terminal, config_map("one"))
    problems = terminal.json("status")["problems"]
    assert len(problems) == 1
    assert f"{terminal.state / name}.damaged" in problems[0]
    terminal.run("down")


def test_a_state_folder_of_an_earlier_version_loads(terminal: Terminal) -> None:
    apply(terminal, config_map("one", text="kept"))
    uid = terminal.json("get", "cm", "one")["metadata"]["uid"]
    terminal.run("down")
    objects = terminal.state / "objects"
    (objects / "index.json").unlink()
    for file in objects.glob("*/*/*.json"):
        file.write_bytes(file.read_bytes().partition(b"\n")[2])
        json.loads(file.read_text())
    apply(terminal, config_map("two"))
    found = terminal.json("get", "cm", "one")
    assert (found["metadata"]["uid"], found["data"]) == (uid, {"text": "kept"})
    assert terminal.json("status")["problems"] == []
    terminal.run("down")


def test_a_failed_first_apply_leaves_no_supervisor(terminal: Terminal) -> None:
    bad = {**pod("bad"), "spec": {**pod("bad")["spec"], "initContainers": [{"name": "first"}]}}
    assert "pod/bad refused" in apply(terminal, bad, code=64)
    until(lambda: terminal.processes() == [])
