"""The command line and the operator's tasks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from stoker.checkpoint.command import program
from stoker.checkpoint.store import CheckpointRoot, Published
from stoker.checkpoint.task import Result, list_task
from stoker.checkpoint.task import run as run_task
from stoker.pod.causes import Cause
from stoker.pod.termination_message import MAX_BYTES, TerminationMessage, parse_termination_message
from testing.checkpoint.synthetic import LAYOUTS, SMALL, WRITER, make_state, save

META = {
    "tokens": 4096,
    "loss": 2.5,
    "learning_rate": 3e-4,
    "elapsed_s": 61.5,
    "layout": {"world_size": 2, "zero_stage": 1},
    "lineage": {"parent": None},
}


@pytest.fixture
def done(tmp_path: Path) -> Published:
    root = CheckpointRoot(tmp_path)
    return save(root, make_state(SMALL), step=7, cut=LAYOUTS["both"], ranks=2, meta=META, files={"config.json": b"{}"})


def run(*arguments: object) -> tuple[int, str]:
    """Run a command and return exit code and output."""
    result = CliRunner().invoke(program, [str(item) for item in arguments], standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.return_value if result.exit_code == 0 else result.exit_code, result.output


@pytest.mark.parametrize(("place", "reason"), [("missing", "does not exist"), ("a file", "is not a folder")])
def test_list_refuses_a_root_that_is_no_folder(place: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("x")
    code, output = run("list", tmp_path / place)
    assert (code, output) == (67, f"error: {tmp_path / place} {reason}\n")


@pytest.mark.parametrize("arguments", [["-h"], ["verify", "-h"], ["task", "-h"], ["task", "verify", "-h"]])
def test_every_command_takes_a_short_help_option(arguments: list[str]) -> None:
    result = CliRunner().invoke(program, arguments)
    assert result.exit_code == 0
    assert result.output.startswith("Usage: ")


def spoil(folder: Path) -> None:
    data = folder / "rank-00000.bin"
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])


def test_verify_says_ok_or_names_the_piece(tmp_path: Path, done: Published) -> None:
    folder = tmp_path / done.folder_name
    code, output = run("verify", folder)
    assert (code, output.splitlines()[1]) == (0, f"digest {done.digest}")
    assert run("verify", folder, "--digest", "0" * 64)[0] == 67
    spoil(folder)
    code, output = run("verify", folder, "--json")
    report = json.loads(output)
    assert (code, report["ok"], report["step"], report["digest"]) == (67, False, 7, done.digest)
    assert "in rank-00000.bin at 0 is damaged" in report["problems"][0]


def test_verify_of_nothing_says_what_is_missing(tmp_path: Path) -> None:
    code, output = run("verify", tmp_path / "nope")
    assert code == 67
    assert "no manifest.json, so not a committed checkpoint" in output


def test_unlisted_files_are_reported_and_are_no_damage(tmp_path: Path, done: Published) -> None:
    (tmp_path / done.folder_name / "notes.txt").write_text("x")
    code, output = run("verify", tmp_path / done.folder_name, "--json")
    assert (code, json.loads(output)["unlisted"]) == (0, ["notes.txt"])


def test_show_gives_the_facts(tmp_path: Path, done: Published) -> None:
    code, output = run("show", tmp_path / done.folder_name, "--json", "--tensors")
    facts = json.loads(output)
    assert code == 0
    assert {key: facts[key] for key in ("step", "tokens", "loss", "layout", "writer", "digest")} == {
        "step": 7,
        "tokens": 4096,
        "loss": 2.5,
        "layout": {"world_size": 2, "zero_stage": 1},
        "writer": WRITER,
        "digest": done.digest,
    }
    assert len(facts["tensor_list"]) == len(SMALL)
    code, output = run("show", tmp_path / done.folder_name, "--tensors")
    assert "model.attention.weight" in output


def test_a_prefix_that_no_tensor_has_compares_nothing_and_says_so(tmp_path: Path, done: Published) -> None:
    folder = tmp_path / done.folder_name
    code, output = run("diff", "--only", "modle.", folder, folder)
    assert (code, output) == (64, "error: --only modle.: no tensor of either checkpoint has a name that begins so\n")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-0.5", "1e999"])
def test_diff_refuses_a_tolerance_that_decides_nothing(tmp_path: Path, done: Published, value: str) -> None:
    folder = tmp_path / done.folder_name
    with pytest.raises(click.BadParameter, match=r"a finite number, 0 or more, is needed \(got") as refused:
        run("diff", f"--tolerance={value}", folder, folder)
    assert refused.value.param is not None
    assert refused.value.param.name == "tolerance"


def test_diff_ends_with_1_when_values_differ(tmp_path: Path, done: Published) -> None:
    other = save(CheckpointRoot(tmp_path), make_state(SMALL), step=8, files={"config.json": b"{}"})
    changed = save(CheckpointRoot(tmp_path), make_state(SMALL, seed=5), step=9, files={"config.json": b"{}"})
    assert run("diff", tmp_path / done.folder_name, tmp_path / other.folder_name) == (0, "the same\n")
    code, output = run("diff", "--json", tmp_path / done.folder_name, tmp_path / changed.folder_name)
    assert (code, json.loads(output)["same"], len(json.loads(output)["differences"])) == (1, False, len(SMALL) - 1)
    assert run("diff", tmp_path / done.folder_name, tmp_path / changed.folder_name)[1].endswith("6 differences\n")


def test_list_shows_committed_and_broken_folders(tmp_path: Path, done: Published) -> None:
    (tmp_path / f"step-00000009.{WRITER}").mkdir()
    code, output = run("list", tmp_path)
    assert code == 0
    assert [line.split()[0] for line in output.splitlines()] == [f"step-00000009.{WRITER}", done.folder_name]
    items = json.loads(run("list", "--json", tmp_path)[1])["checkpoints"]
    assert [(item["folder"], item["committed"]) for item in items] == [
        (f"step-00000009.{WRITER}", False),
        (done.folder_name, True),
    ]


def test_export_writes_a_folder_once(tmp_path: Path, done: Published) -> None:
    arguments = ("export", "--format", "hf", tmp_path / done.folder_name, tmp_path / "out")
    code, output = run(*arguments, "--json")
    assert (code, json.loads(output)["files"]) == (0, ["config.json", "model.safetensors"])
    assert run(*arguments)[0] == 64


@pytest.mark.parametrize("command", ["verify", "show", "diff", "export", "list"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    code, output = run(command, "--help")
    assert code == 0
    assert f"Example: stoker checkpoint {command}" in output


@pytest.mark.parametrize(
    "arguments", [["verify"], ["nope"], ["export", "a", "b", "--format", "gguf"], ["task", "verify"]]
)
def test_a_wrong_command_line_ends_with_64(arguments: list[str]) -> None:
    child = subprocess.run([sys.executable, "-m", "stoker.checkpoint", *arguments], check=False, capture_output=True)
    assert child.returncode == 64
    assert b"Error" in child.stderr


def task(log: Path, *arguments: object) -> tuple[int, TerminationMessage]:
    log.touch()
    code, _ = run("task", *arguments, "--termination-log", log)
    word = parse_termination_message(log.read_text())
    assert word is not None
    return code, word


def test_a_task_in_its_own_process_leaves_its_last_word(tmp_path: Path, done: Published) -> None:
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "stoker.checkpoint",
        "task",
        "verify",
        "--folder",
        str(tmp_path / done.folder_name),
    ]
    assert subprocess.run([*command, "--termination-log", str(log)], check=False, capture_output=True).returncode == 0
    word = parse_termination_message(log.read_text())
    assert word is not None
    assert (word.cause, word.step) == (Cause.COMPLETED, 7)
    assert word.result == figures_of(done) | {"task": "verify", "ok": True, "problems": []}


def figures_of(done: Published) -> dict[str, Any]:
    return {
        "folder": done.folder_name,
        "step": 7,
        "writer": WRITER,
        "tokens": 4096,
        "loss": 2.5,
        "learning_rate": 3e-4,
        "elapsed_s": 61.5,
        "layout": {"world_size": 2, "zero_stage": 1},
        "digest": done.digest,
        "bytes": done.bytes,
        "files": done.files,
        "pieces": done.pieces,
    }


def test_verify_task_says_no_with_the_problems(tmp_path: Path, done: Published) -> None:
    spoil(tmp_path / done.folder_name)
    code, word = task(tmp_path / "log", "verify", "--root", tmp_path, "--folder", done.folder_name)
    assert (code, word.cause, word.result["ok"], word.result["digest"]) == (76, Cause.TASK_FAILED, False, done.digest)
    assert "is damaged" in word.result["problems"][0]
    assert "is damaged" in word.detail


@pytest.mark.parametrize("name", ["verify", "inspect", "import"])
def test_a_task_for_another_digest_or_nothing_says_no(tmp_path: Path, done: Published, name: str) -> None:
    code, word = task(tmp_path / "log", name, "--root", tmp_path, "--folder", done.folder_name, "--digest", "0" * 64)
    assert (code, word.result["ok"]) == (76, False)
    assert "is wanted" in word.detail
    code, word = task(tmp_path / "log", name, "--root", tmp_path, "--folder", f"step-00000001.{WRITER}")
    assert (code, word.result["ok"]) == (76, False)
    assert "not a committed checkpoint" in word.result["problems"][0]


def test_inspect_and_import_report_the_manifest(tmp_path: Path, done: Published) -> None:
    facts = figures_of(done) | {"ok": True}
    assert done.files == len(list((tmp_path / done.folder_name).iterdir())) - 1
    spot = ("--root", tmp_path, "--folder", done.folder_name, "--digest", done.digest)
    assert task(tmp_path / "log", "inspect", *spot)[1].result == facts | {"task": "inspect", "problems": []}
    assert task(tmp_path / "log", "import", *spot)[1].result == facts | {"task": "import", "problems": []}


def test_inspect_reads_no_data_but_misses_no_file(tmp_path: Path, done: Published) -> None:
    spoil(tmp_path / done.folder_name)
    spot = ("--root", tmp_path, "--folder", done.folder_name)
    assert task(tmp_path / "log", "inspect", *spot)[0] == 0
    file = tmp_path / done.folder_name / "rank-00000.bin"
    file.write_bytes(file.read_bytes()[:-1])
    code, word = task(tmp_path / "log", "inspect", *spot)
    assert (code, word.cause, word.result["ok"]) == (76, Cause.TASK_FAILED, False)
    assert "rank-00000.bin" in word.result["problems"][0]
    file.unlink()
    assert task(tmp_path / "log", "inspect", *spot)[0] == 76


def test_delete_task_deletes_once_and_may_be_repeated(tmp_path: Path, done: Published) -> None:
    spot = ("--folder", tmp_path / done.folder_name, "--digest", done.digest)
    code, word = task(tmp_path / "log", "delete", *spot)
    assert (code, word.result["deleted"], word.result["left"]) == (0, [done.folder_name], [])
    code, word = task(tmp_path / "log", "delete", *spot)
    assert (code, word.result["deleted"]) == (0, [])
    assert not (tmp_path / done.folder_name).exists()


def test_delete_task_needs_the_recorded_digest(tmp_path: Path, done: Published) -> None:
    for digest in ([], ["--digest", "0" * 64]):
        code, word = task(tmp_path / "log", "delete", "--root", tmp_path, "--folder", done.folder_name, *digest)
        assert (code, word.cause, word.result["deleted"]) == (76, Cause.TASK_FAILED, [])
    assert (tmp_path / done.folder_name / "rank-00000.bin").exists()


@pytest.mark.parametrize("folder", ["../outside", "/etc", "link"])
@pytest.mark.parametrize("name", ["verify", "delete"])
def test_a_task_does_not_leave_its_root(tmp_path: Path, done: Published, name: str, folder: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path / done.folder_name)
    code, word = task(tmp_path / "log", name, "--root", root, "--folder", folder, "--digest", done.digest)
    assert (code, word.cause) == (76, Cause.TASK_FAILED)
    assert "must lie below the root" in word.detail
    assert (tmp_path / done.folder_name / "rank-00000.bin").exists()


def test_list_task_gives_every_save_in_pages_that_fit_a_termination_message(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    for step in range(60):
        save(root, make_state({"w": ((), "int8")}), step=step)
    save(root, make_state({"w": ((), "int8")}), step=99, writer="ffffffff")
    for number in range(10):
        (tmp_path / f"step-{100 + number:08d}.{WRITER}").mkdir()
    pages: list[list[Result]] = []
    omitted, after = 60, list[Any]()
    while omitted:
        code, word = task(tmp_path / "log", "list", "--root", tmp_path, "--writer", WRITER, *after)
        assert (code, (tmp_path / "log").stat().st_size <= MAX_BYTES) == (0, True)
        pages.append(word.result["saves"])
        assert word.result["omitted"] == omitted - len(pages[-1])
        omitted, after = word.result["omitted"], ["--after-step", pages[-1][-1]["step"]]
    assert [found["step"] for page in pages for found in page] == list(range(60))
    assert min(map(len, pages[:-1])) >= 20
    assert {found["digest"] for page in pages for found in page} == {found.digest for found in root.committed()[1:]}
    assert word.result["broken"] == [f"step-{number:08d}.{WRITER}" for number in range(109, 101, -1)]
    assert [found["step"] for found in list_task(tmp_path)["saves"]][:2] == [0, 1]


def test_a_task_on_a_lost_mount_is_a_storage_error_not_a_verdict() -> None:
    def lost() -> Result:
        raise OSError(116, "Stale file handle", "/mnt/x")

    word = run_task(lost, "verify", f"/mnt/step-00000001.{WRITER}")
    assert (word.cause, word.result) == (
        Cause.STORAGE_ERROR,
        {"task": "verify", "folder": f"step-00000001.{WRITER}"},
    )
    assert "Stale file handle" in word.detail


@pytest.mark.parametrize("root", ["missing", "empty", "other", "file"])
@pytest.mark.parametrize("name", ["verify", "inspect", "import"])
def test_a_storage_without_any_save_is_no_verdict_on_a_recorded_one(
    tmp_path: Path, done: Published, name: str, root: str
) -> None:
    """The claim has lost its content, or is another one: the checkpoint may be as good as ever."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "corpus").mkdir(parents=True)
    (tmp_path / "file").write_text("not a folder")
    spot = ("--root", tmp_path / root, "--folder", done.folder_name)
    code, word = task(tmp_path / "log", name, *spot, "--digest", done.digest)
    assert (code, word.cause) == (68, Cause.STORAGE_ERROR)
    wanted = f"no sign of any save, but {done.folder_name} was written: the storage is empty or another one"
    assert word.detail.endswith(f"{wanted}: '{tmp_path / root}'")
    assert task(tmp_path / "log", name, *spot)[0] == 76, "without a digest none is known to have been written"


@pytest.mark.parametrize("sign", ["another save", "LATEST"])
def test_a_save_that_is_gone_from_its_own_storage_is_missing(tmp_path: Path, done: Published, sign: str) -> None:
    shutil.rmtree(tmp_path / done.folder_name)
    if sign == "another save":
        save(CheckpointRoot(tmp_path), make_state(SMALL), step=8)
        (tmp_path / "LATEST").unlink()
    spot = ("--root", tmp_path, "--folder", done.folder_name, "--digest", done.digest)
    code, word = task(tmp_path / "log", "verify", *spot)
    assert (code, word.cause) == (76, Cause.TASK_FAILED)
    assert "no manifest.json, so not a committed checkpoint" in word.detail


def test_many_problems_fit_a_termination_message(tmp_path: Path) -> None:
    state = make_state({f"{'tensor' * 60}.{number}": ((4,), "float32") for number in range(50)})
    done = save(CheckpointRoot(tmp_path), state)
    data = tmp_path / done.folder_name / "rank-00000.bin"
    data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))
    code, word = task(tmp_path / "log", "verify", "--root", tmp_path, "--folder", done.folder_name)
    assert code == 76
    assert word.result["problems"][-1] == "and 42 more"
