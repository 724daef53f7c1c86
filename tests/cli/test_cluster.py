"""Verbs against a cluster: a kubeconfig, a real port, the object store with the real admission behind it."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from stoker.cli.cluster_client import find_access
from stoker.cli.main import stoker
from stoker.operator.api.trainingjob import TrainingJob
from stoker.operator.cluster.kube.credentials import NoCredentials, context_namespace
from stoker.operator.domain.plan import Ref
from stoker.operator.domain.settings import Settings
from stoker.operator.render.trainer import pin
from stoker.pod.metric_reader import history_lines, read_history
from testing.gateway.kube_server import KubeServer
from testing.gateway.verbs import emptied, manifest, run
from testing.gateway.world import World
from testing.operator.devices import claim, device, resource_slice


def test_submit_get_describe_delete(server: KubeServer, tmp_path: Path) -> None:
    file = manifest(tmp_path)
    assert run(server, "submit", "-f", file) == "trainingjob/run created\n"
    assert run(server, "submit", "-f", file) == "trainingjob/run unchanged\n"
    manifest(tmp_path, run={"suspend": True})
    assert json.loads(run(server, "submit", "-f", file, "--json"))["result"] == "configured"
    assert [line.split()[0] for line in run(server, "get").splitlines()] == ["NAME", "run"]
    assert run(server, "get", "tj", "-A").splitlines()[1].split()[:2] == ["default", "run"]
    assert json.loads(run(server, "get", "tj/run", "--json"))["spec"]["run"]["suspend"] is True
    assert run(server, "describe", "tj", "run").startswith("TrainingJob default/run\n")
    assert run(server, "get", "tj", "-n", "elsewhere") == "no trainingjobs in namespace elsewhere\n"
    assert run(server, "delete", "tj", "run") == "trainingjob/run deleted\n"
    assert "does not exist" in run(server, "delete", "tj", "run", code=1)
    assert "does not exist" in run(server, "delete", "-f", file), "what is gone already is no failure of a file"


def test_a_refused_edit_names_the_fields_that_would_change(server: KubeServer, tmp_path: Path) -> None:
    file = manifest(tmp_path)
    run(server, "submit", "-f", file)
    stored = json.loads(run(server, "get", "tj/run", "--json"))["spec"]["training"]
    said = run(server, "submit", "-f", file, "--set", "spec.training.totalSteps=7", code=64)
    told = (
        f"training is fixed: make a new TrainingJob (spec.training.totalSteps is {stored['totalSteps']}, given is 7)\n"
    )
    assert said.endswith(told)


def test_what_the_cluster_refuses_is_an_exit_code_and_a_message(server: KubeServer, tmp_path: Path) -> None:
    refused = run(server, "submit", "-f", manifest(tmp_path, nonsense=1), code=64)
    assert refused.startswith('trainingjob/run refused: TrainingJob.stoker.dev "run" is invalid: spec.nonsense: ')
    assert "'Nope!' is no namespace: lower-case letters" in run(server, "get", "tj", "-n", "Nope!", code=2)
    assert "does not exist" in run(server, "describe", "tj/nothing", code=1)
    assert "does not exist" in run(server, "delete", "tj", "nothing", code=1)
    assert "unknown kind 'spaceships'" in run(server, "get", "spaceships", code=64)
    gone = CliRunner().invoke(stoker, ["get", "--kubeconfig", str(tmp_path / "none")])
    assert (gone.exit_code, "none" in gone.output) == (64, True)


def test_a_wait_outlives_a_server_that_cannot_answer_for_a_while(server: KubeServer, tmp_path: Path) -> None:
    """The wait of a long run is not lost with a restart of the API server."""
    job = server.do(lambda found: found.put_status(found.job(), phase="Running", observedGeneration=1))
    asked: list[str] = []

    async def restarting(request: Request) -> JSONResponse:
        asked.append(request.url.path)
        if len(asked) == 2:
            server.world.put_status(job, phase="Completed", observedGeneration=1, conditions=[])
            server.world.api.router.routes.remove(route)
        return JSONResponse({"kind": "Status", "code": 503, "message": "shutting down"}, 503)

    route = Route("/apis/stoker.dev/v1alpha1/namespaces/default/checkpoints", restarting)
    server.do(lambda found: found.api.router.routes.insert(0, route))
    out = run(server, "submit", "-f", manifest(tmp_path), "--wait", "--timeout", "60")
    assert len(asked) == 2
    assert re.search(r"/checkpoints: shutting down; asking again for 5 minutes\n", out)
    assert {"the cluster answers again", "trainingjob/run  Completed"} <= {line[9:] for line in out.splitlines()}


def test_waiting_for_a_job_follows_it_to_its_end(server: KubeServer, tmp_path: Path) -> None:
    def end(phase: str) -> None:
        while not server.do(lambda found: found.objects.of_kind("TrainingJob")):
            time.sleep(0.02)
        server.do(
            lambda found: found.put_status(
                found.objects.of_kind("TrainingJob")[0], phase=phase, observedGeneration=1, conditions=[]
            )
        )

    for phase, code in (("Completed", 0), ("Failed", 1)):
        operator = threading.Thread(target=end, args=(phase,))
        operator.start()
        out = run(server, "submit", "-f", manifest(tmp_path), "--wait", "--timeout", "60", code=code)
        operator.join()
        assert f"trainingjob/run  {phase}" in out
        server.do(emptied)


def test_logs_of_a_pod_and_of_a_job(server: KubeServer) -> None:
    job = server.do(lambda found: found.put_status(found.job(), phase="Running"))
    pods = [server.do(lambda found, r=r: found.pod(job, r, f"rank {r} one\nrank {r} two\n")) for r in range(2)]  # type: ignore[misc]
    assert run(server, "logs", "run-a0-1") == "rank 1 one\nrank 1 two\n"
    assert run(server, "logs", "tj/run", "--tail", "1") == "[run-a0-0] rank 0 two\n[run-a0-1] rank 1 two\n"

    def end() -> None:
        for pod in pods:
            server.do(lambda found, pod=pod: found.put_status(pod, phase="Succeeded"))  # type: ignore[misc]
        server.do(lambda found: found.put_status(job, phase="Completed"))

    ending = threading.Timer(0.5, end)
    ending.start()
    followed = run(server, "logs", "tj/run", "-f")
    ending.join()
    assert sorted(followed.splitlines()) == sorted(
        f"[run-a0-{r}] rank {r} {n}" for r in range(2) for n in ("one", "two")
    )
    assert "does not exist" in run(server, "logs", "nothing", code=1)


def test_a_job_is_named_as_other_verbs_name_it(server: KubeServer, tmp_path: Path) -> None:
    run(server, "submit", "-f", manifest(tmp_path))
    assert run(server, "suspend", "tj/run") == "trainingjob/run is being suspended\n"
    assert run(server, "resume", "trainingjob/run") == "trainingjob/run goes on\n"
    assert "'ckpt/run' is no job: give its name, or tj/NAME" in run(server, "save", "ckpt/run", code=2)


def test_save_suspend_and_resume(server: KubeServer) -> None:
    job = server.do(lambda found: found.put_status(found.job(), phase="Running"))
    assert run(server, "save", "run", "--pin").startswith("checkpoint/run-save-")
    (saved,) = server.do(lambda found: found.objects.of_kind("Checkpoint"))
    assert (saved["spec"]["pinned"], saved["spec"]["source"]["jobRef"]["uid"]) == (True, job["metadata"]["uid"])
    assert "only a suspended or finished job" in run(server, "resume", "run", code=1)
    assert run(server, "suspend", "run") == "trainingjob/run is being suspended\n"
    assert run(server, "resume", "run") == "trainingjob/run goes on\n"
    (stored,) = server.do(lambda found: found.objects.of_kind("TrainingJob"))
    assert stored["spec"]["run"]["suspend"] is False


def test_a_job_that_is_being_cancelled_is_neither_suspended_nor_resumed(server: KubeServer) -> None:
    server.do(lambda found: found.put_status(found.job(run={"suspend": True, "cancel": True}), phase="Suspended"))
    for verb in ("suspend", "resume"):
        assert "job run is being cancelled, and that is for good" in run(server, verb, "run", code=1)
    (stored,) = server.do(lambda found: found.objects.of_kind("TrainingJob"))
    assert stored["spec"]["run"]["suspend"] is True


def test_a_wait_for_a_save_ends_with_the_save_or_with_its_time(server: KubeServer) -> None:
    server.do(lambda found: found.put_status(found.job(), phase="Running"))
    late = run(server, "save", "run", "--wait", "--timeout", "0", code=1)
    assert re.fullmatch(r"(checkpoint/run-save-\w{6}) is being saved\n\1 is still Pending after 0 s\n", late)
    assert "--timeout belongs to --wait" in run(server, "save", "run", "--timeout", "5", code=2)
    server.do(emptied)
    server.do(lambda found: found.put_status(found.job(), phase="Running"))

    def verify() -> None:
        while not (saves := server.do(lambda found: found.objects.of_kind("Checkpoint"))):
            time.sleep(0.02)
        ready = {"type": "Ready", "status": "True", "reason": "Verified", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        settled = {"phase": "Complete", "step": 7, "observedGeneration": 1, "conditions": [ready]}
        server.do(lambda found: found.put_status(saves[0], **settled))

    operator = threading.Thread(target=verify)
    operator.start()
    saved = run(server, "save", "run", "--wait", "--timeout", "60")
    operator.join()
    assert "  Complete  " in saved


def test_a_finished_job_begins_anew_at_a_checkpoint(server: KubeServer) -> None:
    job = server.do(lambda found: found.put_status(found.job(), phase="Completed"))
    assert "no verified checkpoint" in run(server, "resume", "run", code=1)
    server.do(lambda found: [found.checkpoint(job, step) for step in (50, 100)])
    late = CliRunner().invoke(stoker, ["resume", "--kubeconfig", str(server.kubeconfig), "run"])
    assert (late.exit_code, "--total-steps: the checkpoint is at step 100 of 100" in late.output) == (2, True)
    assert run(server, "resume", "run", "--from", "run-50").startswith("trainingjob/run-go-")
    (new,) = [
        item for item in server.do(lambda f: f.objects.of_kind("TrainingJob")) if item["metadata"]["name"] != "run"
    ]
    assert new["spec"]["modelFrom"] == {"checkpoint": {"name": "run-50", "state": "All"}}
    assert "it cannot save any more" in run(server, "save", "run", code=1)
    assert "only a job that goes on" in run(server, "suspend", "run", code=1)


def test_top_counts_gpus_and_shows_what_runs(server: KubeServer) -> None:
    job = server.do(lambda found: found.put_status(found.job(), phase="Running", worldSize=8))
    server.do(lambda found: found.pod(job, 0, "", gpus=1))
    server.do(lambda found: found.put_status(found.job("done"), phase="Completed"))
    lines = [line.split() for line in run(server, "top").splitlines()]
    assert lines[:2] == [["NODE", "STATUS", "GPUS", "FREE"], ["local", "Ready", "2", "1"]]
    assert lines[3:5] == [
        ["JOB", "PHASE", "RANKS", "GPUS", "STEP", "TOKENS/S", "MESSAGE"],
        ["run", "Running", "8", "1"],
    ]
    assert run(server, "top", "jobs").splitlines()[0].startswith("JOB")
    assert "NODE" not in run(server, "top", "deployments")


def test_top_counts_devices_of_drivers_by_name(server: KubeServer) -> None:
    def story(found: World) -> None:
        job = found.put_status(found.job(), phase="Running", worldSize=2)
        found.pod(job, 0, "", claims=("run-gpu",))
        slices = resource_slice("local", [device("d0"), device("d1"), device("d2")])
        found.devices.serve(slices, claim("run-gpu", [("local", "d0"), ("local", "d1")]), versions=("v1beta1",))

    server.do(story)
    lines = [re.split(r"  +", line.strip()) for line in run(server, "top").splitlines()]
    assert lines[:2] == [
        ["NODE", "STATUS", "GPUS", "FREE", "FREE BY RESOURCE"],
        ["local", "Ready", "5", "3", "1/3 gpu.example.com, 2/2 nvidia.com/gpu"],
    ]
    assert lines[4] == ["run", "Running", "2", "2"]
    assert run(server, "top", "jobs").splitlines()[1].split() == ["run", "Running", "2", "2"]


def test_top_without_the_right_to_nodes_shows_the_rest(server: KubeServer) -> None:
    """Users of one namespace may not list nodes: a note where they are one part of three, else an error."""
    message = 'nodes is forbidden: User "a" cannot list resource "nodes" at the cluster scope'
    server.do(lambda found: found.put_status(found.job(), phase="Running"))
    with forbidden(server, "/api/v1/nodes", message):
        result = CliRunner().invoke(stoker, ["top", "--kubeconfig", str(server.kubeconfig)])
        alone = run(server, "top", "nodes", code=1)
    assert (result.exit_code, result.stdout.split()[0], "run " in result.stdout) == (0, "JOB", True)
    assert result.stderr.startswith("nodes are not shown: ")
    assert message in result.stderr
    assert message in alone


def test_top_does_not_count_claims_that_the_user_may_not_read_as_none(server: KubeServer) -> None:
    job = server.do(lambda found: found.put_status(found.job(), phase="Running", worldSize=2))
    server.do(lambda found: found.pod(job, 0, "", claims=("run-gpu",)))
    server.do(lambda found: found.pod(found.put_status(found.job("plain"), phase="Running"), 0, "", gpus=1))
    server.do(lambda found: found.devices.serve(versions=("v1",)))
    with forbidden(server, "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims", "no claims"):
        note, _, *rows = run(server, "top", "jobs").splitlines()
    assert "GPUs of dynamic resource allocation are not counted: " in note
    assert "no claims" in note
    assert [row.split() for row in rows] == [["plain", "Running", "1"], ["run", "Running", "2", "?"]]


@contextlib.contextmanager
def forbidden(server: KubeServer, path: str, message: str) -> Iterator[None]:
    """Refuse to list what is at a path."""

    async def refused(_: Request) -> JSONResponse:
        return JSONResponse({"kind": "Status", "code": 403, "reason": "Forbidden", "message": message}, 403)

    route = Route(path, refused)
    server.do(lambda found: found.api.router.routes.insert(0, route))
    try:
        yield
    finally:
        server.do(lambda found: found.api.router.routes.remove(route))


def test_credentials_are_those_of_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: KubeServer) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(NoCredentials, match="no kubeconfig: neither --kubeconfig nor"):
        find_access(None, None, {})
    assert find_access(None, "x", {"KUBECONFIG": "/a"}).kubeconfig == "/a"
    assert find_access("/b", None, {"KUBECONFIG": "/a"}).kubeconfig == "/b"
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text(server.kubeconfig.read_text())
    access = find_access(None, None, {})
    assert (access.kubeconfig, context_namespace(access)) == (str(tmp_path / ".kube" / "config"), "default")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_the_shell(shell: str) -> None:
    result = CliRunner().invoke(stoker, ["completion", shell])
    assert (result.exit_code, "_STOKER_COMPLETE" in result.output) == (0, True)


def test_completion_offers_verbs_and_options() -> None:
    environment = {"_STOKER_COMPLETE": "bash_complete", "COMP_WORDS": "stoker su", "COMP_CWORD": "1"}
    result = CliRunner().invoke(stoker, [], env=environment, prog_name="stoker")
    assert result.output.split() == ["plain,submit", "plain,suspend"]


def test_a_job_is_plotted_from_its_volume_after_its_end(server: KubeServer, tmp_path: Path) -> None:
    """A task that fails is told and made anew; the one that read the log answers the next question too."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f'{{"kind": "step", "step": {n}, "loss": {9 - n}.5}}\n' for n in range(1, 4)))
    run(server, "submit", "-f", manifest(tmp_path))
    assert "has no log of metrics on a claim" in run(server, "plot", "run", code=1)
    assert "does not exist" in run(server, "plot", "tj/nothing", code=1)
    server.do(_ended_with_a_rendering)
    for output, shown, code in ((None, "failed: no such file", 1), (log, "[8.5, 7.5, 6.5]", 0), (log, "[1, 2, 3]", 0)):
        kubelet = threading.Thread(target=_run_tasks, args=(server, output))
        kubelet.start()
        assert shown in run(server, "plot", "tj/run", "--json", code=code)
        kubelet.join()
    assert "wrote" in run(server, "plot", "run", "--png", str(tmp_path / "loss.png"))
    assert "has no pods" in run(server, "logs", "tj/run", code=1)


def _ended_with_a_rendering(found: World) -> None:
    job = found.objects.of_kind("TrainingJob")[0]
    rendering = pin(TrainingJob.model_validate(job), None, Settings())
    found.put_status(job, phase="Completed", pinned=rendering.to_wire())


def _run_tasks(server: KubeServer, log: Path | None) -> None:
    """What a kubelet does with a pod that reads metrics; without a log the pod fails."""
    until = time.monotonic() + 60
    while time.monotonic() < until and not server.do(lambda found: _run_task(found, log)):
        time.sleep(0.02)


def _run_task(found: World, log: Path | None) -> bool:
    for pod in found.objects.of_kind("Pod"):
        metadata = pod["metadata"]
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            return log is not None
        if log is None:
            word = {"exitCode": 76, "message": '{"detail": "no such file"}'}
            found.put_status(pod, phase="Failed", containerStatuses=[{"name": "main", "state": {"terminated": word}}])
        else:
            output = found.folders.log(metadata["namespace"], metadata["name"])
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text("\n".join(history_lines(read_history(log))) + "\n")
            found.put_status(pod, phase="Succeeded")
        return True
    return False


def test_a_backup_brings_jobs_checkpoints_and_deployments_back(server: KubeServer, tmp_path: Path) -> None:
    """What is printed is admitted by another cluster, where the checkpoints are adopted."""
    server.do(_worth_keeping)
    made = CliRunner().invoke(stoker, ["backup", "--kubeconfig", str(server.kubeconfig)])
    assert made.exit_code == 0, made.output
    file = tmp_path / "backup.yaml"
    file.write_text(made.stdout)
    assert "trainingjob/done (default): left out: it is Completed" in made.stderr
    assert "trainingjob/early (default): begins anew: it has no verified checkpoint" in made.stderr
    assert "trainingjob/late (default): goes on from checkpoint late-40" in made.stderr
    assert "checkpoint/late-50 (default): left out: it is Corrupt" in made.stderr
    assert "inferencedeployment/chat (default): serves checkpoint done-100" in made.stderr
    server.do(emptied)
    lines = run(server, "submit", "-f", str(file)).splitlines()
    assert sorted(lines) == [
        "checkpoint/done-100 created",
        "checkpoint/late-40 created",
        "inferencedeployment/chat created",
        "trainingjob/early created",
        "trainingjob/late created",
    ]
    found = json.loads(run(server, "get", "ckpt/late-40", "--json"))["spec"]
    assert found["source"] == {
        "import": {
            "storage": {"claimName": "claim", "path": "late"},
            "folder": "step-00000040.0a1b2c3d",
            "digest": f"blake3:{40:064x}",
        }
    }
    late = json.loads(run(server, "get", "tj/late", "--json"))
    assert late["spec"]["modelFrom"]["checkpoint"] == {"name": "late-40", "state": "All"}
    assert late["spec"]["run"]["suspend"] is True
    assert late["metadata"]["labels"] == {"team": "a"}
    chat = json.loads(run(server, "get", "infd/chat", "--json"))["spec"]
    assert chat["model"] == {"checkpointRef": {"name": "done-100"}, "dtype": "auto"}


def _worth_keeping(found: World) -> None:
    done = found.put_status(found.job("done"), phase="Completed")
    found.checkpoint(done, 100)
    found.put_status(found.job("early"), phase="Running")
    late = found.put_status(found.job("late", run={"suspend": True}), phase="Suspended")
    metadata = late["metadata"]
    ref = Ref("TrainingJob", "default", "late", metadata["uid"])
    found.objects.patch(ref, {"metadata": {"labels": {"team": "a", "stoker.dev/own": "x"}}})
    found.checkpoint(late, 40)
    found.put_status(found.checkpoint(late, 50, verified=False), phase="Corrupt")
    pools = [{"name": "main", "replicas": 1}]
    chat = found.objects.create(
        {
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "InferenceDeployment",
            "metadata": {"name": "chat", "namespace": "default"},
            "spec": {"model": {"checkpointSelector": {"jobRef": {"name": "done"}}}, "pools": pools},
        }
    )
    found.put_status(chat, phase="Serving", currentCheckpoint={"name": "done-100", "step": 100})
