"""What users of kubectl and gh expect of the verbs: formats, watches, selectors, deletions, logs, near names."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from click.testing import CliRunner

from stoker.cli import object_names
from stoker.cli.cluster_client import ClusterClient, find_access
from stoker.cli.deletion import DeletionWait, confirm, delete_all
from stoker.cli.label_selector import parse_selector
from stoker.cli.listing import Listing, Watch
from stoker.cli.main import stoker
from stoker.cli.object_names import proposals
from stoker.cli.output_format import Format
from stoker.cli.targets import parse_targets
from stoker.cli.text_style import PLAIN
from stoker.operator.cluster.kube.errors import error_of
from stoker.operator.domain.plan import Ref
from testing.gateway.kube_server import KubeServer, write_kubeconfig
from testing.gateway.verbs import manifest, run
from testing.operator.bad_manifests import POOL, changed


def labelled(server: KubeServer, name: str, **labels: str) -> dict[str, Any]:
    def make(found: Any) -> dict[str, Any]:
        job = found.job(name)
        ref = Ref("TrainingJob", "default", name, job["metadata"]["uid"])
        changed: dict[str, Any] = found.objects.patch(ref, {"metadata": {"labels": labels}})
        return changed

    return server.do(make)


def test_objects_are_printed_in_every_format(server: KubeServer) -> None:
    for name, team in (("one", "a"), ("two", "b")):
        labelled(server, name, team=team)
    assert run(server, "get", "tj", "-o", "name") == "trainingjob/one\ntrainingjob/two\n"
    assert run(server, "get", "tj,ckpt", "-l", "team in (a)", "-o", "name") == "trainingjob/one\n"
    assert run(server, "get", "tj", "two", "one", "-o", "name") == "trainingjob/two\ntrainingjob/one\n"
    assert run(server, "get", "tj", "--no-headers").splitlines()[0].startswith("one ")
    one = yaml.safe_load(run(server, "get", "tj/one", "-o", "yaml"))
    assert (one["kind"], one["apiVersion"], one["metadata"]["name"]) == ("TrainingJob", "stoker.dev/v1alpha1", "one")
    both = json.loads(run(server, "get", "tj", "-o", "json"))
    assert (both["kind"], len(both["items"])) == ("List", 2)
    assert yaml.safe_load(run(server, "get", "tj", "-l", "team=z", "-o", "yaml"))["items"] == []
    wide = run(server, "get", "tj", "-o", "wide").splitlines()[0]
    assert [word for word in ("RANKS", "TOKENS/S", "ATTEMPT") if word not in wide] == []
    assert "local" in run(server, "get", "nodes")
    pages = run(server, "describe", "tj")
    assert ("TrainingJob default/one\n" in pages, "TrainingJob default/two\n" in pages) == (True, True)
    assert yaml.safe_load(run(server, "describe", "tj/one", "-o", "yaml"))["events"] == []


def test_scale_is_read_and_written_as_an_autoscaler_does(server: KubeServer) -> None:
    pool = changed(POOL, {"metadata.name": "chat-main"})
    uid = server.do(lambda found: found.objects.create(pool))["metadata"]["uid"]
    path = f"{server.url}/apis/stoker.dev/v1alpha1/namespaces/default/enginepools/chat-main/scale"
    other = path.replace("enginepools/chat-main", "configmaps/x").replace("apis/stoker.dev/v1alpha1", "api/v1")
    with httpx.Client(timeout=60) as http:
        scale = http.get(path).json()
        assert (scale["kind"], scale["spec"], scale["metadata"]["uid"]) == ("Scale", {"replicas": 2}, uid)
        assert http.put(path, json={**scale, "spec": {"replicas": 5}}).json()["spec"] == {"replicas": 5}
        tried = http.patch(path, json={"spec": {"replicas": 0}}, params={"dryRun": "All"})
        assert tried.json()["spec"] == {"replicas": 0}
        assert http.get(path).json()["spec"] == {"replicas": 5}
        wrong = http.put(path, json={"spec": {"replicas": "9"}})
        assert (wrong.status_code, 'a whole number is needed, got "9"' in wrong.json()["message"]) == (422, True)
        assert http.get(other).status_code == 404


def test_a_watch_prints_what_changes_and_what_goes(server: KubeServer, capsys: pytest.CaptureFixture[str]) -> None:
    one = labelled(server, "one")
    client = ClusterClient(find_access(str(server.kubeconfig), None))
    try:
        watch = Watch(Listing(client, parse_targets(["tj"]), parse_selector(None)), Format.TABLE, PLAIN)
        shown = []
        for change in (
            lambda found: None,
            lambda found: None,
            lambda found: found.put_status(one, phase="Running"),
            lambda found: found.job("two"),
            lambda found: found.objects.delete(Ref("TrainingJob", "default", "one", one["metadata"]["uid"])),
        ):
            server.do(change)
            watch.look()
            shown.append([" ".join(line.split()[:2]) for line in capsys.readouterr().out.splitlines()])
    finally:
        client.close()
    assert shown[0][0] == "NAME PHASE"
    assert [len(lines) for lines in shown] == [2, 0, 1, 1, 1]
    assert shown[2] == ["one Running"]
    assert shown[3][0].startswith("two")
    assert shown[4] == ["trainingjob/one deleted"]


def test_a_name_that_is_near_is_proposed(server: KubeServer) -> None:
    labelled(server, "pretrain")
    assert "trainingjob/pretrian does not exist in namespace default; did you mean pretrain?" in run(
        server, "get", "tj", "pretrian", code=1
    )
    for words in (
        ["describe", "tj/pretrian"],
        ["logs", "tj/pretrian"],
        ["save", "pretrian"],
        ["delete", "tj/pretrian"],
    ):
        assert "did you mean pretrain?" in run(server, *words, code=1)
    words_meant = {"trainingjub": "trainingjob", "jobs": "trainingjobs", "deployment": "inferencedeployment"}
    for word, meant in words_meant.items():
        told = run(server, "get", word, code=64)
        assert f"unknown kind '{word}', did you mean {meant}; known are trainingjobs (tj), checkpoints (ckpt)" in told


def test_several_objects_are_deleted_and_many_only_with_yes(server: KubeServer) -> None:
    for name, team in (("one", "a"), ("two", "a"), ("three", "b"), ("four", "b")):
        labelled(server, name, team=team)
    assert run(server, "delete", "tj/one", "tj/none", code=1).splitlines() == [
        "trainingjob/none does not exist in namespace default; did you mean one?",
        "trainingjob/one deleted",
    ]
    assert "does not exist" in run(server, "delete", "tj", "one", "--ignore-not-found")
    assert run(server, "delete", "tj", "-l", "team=a", "--dry-run") == "trainingjob/two would be deleted\n"
    refused = CliRunner().invoke(stoker, ["delete", "--kubeconfig", str(server.kubeconfig), "tj", "-l", "team=a"])
    assert "this deletes 1 objects: confirm with --yes" in refused.output
    assert run(server, "delete", "tj", "-l", "team=a", "--yes") == "trainingjob/two deleted\n"
    assert "nothing to delete in namespace default" in run(server, "delete", "tj", "-l", "team=a", "--yes")
    assert run(server, "delete", "tj", "--all", "--yes").count(" deleted\n") == 2


@pytest.mark.parametrize("said", ["y\n", "n\n"])
def test_a_question_lists_what_would_be_deleted(said: str) -> None:
    found = [{"kind": "TrainingJob", "metadata": {"name": name}} for name in ("one", "two")]
    with CliRunner().isolation(input=said) as (_, error, *_rest):
        if said == "y\n":
            confirm(found, yes=False, terminal=True)
        else:
            with pytest.raises(SystemExit):
                confirm(found, yes=False, terminal=True)
        asked = error.getvalue().decode()
    assert "  trainingjob/one\n  trainingjob/two\nDelete these 2 objects? [y/N]: " in asked


def test_a_submission_is_tried_changed_and_followed(server: KubeServer, tmp_path: Path) -> None:
    file = manifest(tmp_path)
    assert run(server, "submit", "-f", file, "--dry-run") == "trainingjob/run created (dry run)\n"
    assert "does not exist" in run(server, "get", "tj/run", code=1)
    suspended = ["--set", "spec.run.suspend=true"]
    assert run(server, "submit", "-f", file, *suspended) == "trainingjob/run created\n"
    assert run(server, "submit", "-f", file, "--dry-run") == "trainingjob/run configured (dry run)\n"
    assert json.loads(run(server, "get", "tj/run", "-o", "json"))["spec"]["run"]["suspend"] is True
    assert run(server, "submit", "-f", file, *suspended, "--dry-run") == "trainingjob/run unchanged (dry run)\n"
    refused = run(server, "submit", "-f", file, "--set", "spec.training.totalSteps=-1", "--dry-run", code=64)
    assert "totalSteps" in refused
    assert "--set spec: " in run(server, "submit", "-f", file, "--set", "spec", code=64)


@pytest.mark.parametrize("value", ["", "null", '""'])
def test_a_namespace_that_is_set_to_nothing_is_that_of_the_command(
    server: KubeServer, tmp_path: Path, value: str
) -> None:
    file = Path(manifest(tmp_path))
    file.write_text(file.read_text().replace("metadata:\n", "metadata:\n  namespace: elsewhere\n"))
    run(server, "submit", "-f", str(file), "--set", f"metadata.namespace={value}", "-n", "research")
    assert run(server, "get", "tj", "-n", "research", "-o", "name") == "trainingjob/run\n"


def test_a_job_is_followed_through_its_attempts_to_its_end(server: KubeServer, tmp_path: Path) -> None:
    """A second attempt comes while the first one's log is being followed; the outcome is the exit code."""
    file = manifest(tmp_path)
    run(server, "submit", "-f", file)
    job = server.do(lambda found: found.objects.of_kind("TrainingJob")[0])

    def live() -> None:
        first = server.do(lambda found: found.pod(job, 0, "[rank 0] lost\nstep 1\n"))
        server.do(lambda found: found.put_status(first, phase="Failed"))
        second = server.do(lambda found: found.pod(job, 0, "step 2\n", attempt=1))
        server.do(lambda found: found.put_status(second, phase="Failed"))
        server.do(lambda found: found.put_status(job, phase="Failed", observedGeneration=1, conditions=[]))

    living = threading.Timer(0.3, live)
    living.start()
    followed = run(server, "submit", "-f", file, "--follow", code=1)
    living.join()
    assert "step 2\n" in followed
    assert "trainingjob/run  Failed" in followed
    assert run(server, "logs", "tj/run", "--previous") == "[rank 0] lost\nstep 1\n"
    assert run(server, "logs", "tj/run", "--previous", "--rank", "0") == "[rank 0] lost\n"
    assert run(server, "logs", "tj/run", "--attempt", "1") == "step 2\n"
    assert "no pod of attempt 7 is left" in run(server, "logs", "tj/run", "--attempt", "7", code=1)


def test_a_finished_job_with_the_longest_name_goes_on(server: KubeServer) -> None:
    name = f"{'a' * 29}-{'b' * 10}"
    job = server.do(lambda found: found.put_status(found.job(name), phase="Completed"))
    server.do(lambda found: found.checkpoint(job, 50))
    assert f"trainingjob/{'a' * 29}-go-" in run(server, "resume", name)


BEFORE: dict[str, tuple[str, ...]] = {"tj": ("teach", "try"), "ckpt": ("teach-8",)}


@pytest.mark.parametrize(
    ("before", "incomplete", "kind", "offered"),
    [
        ([], "t", None, ["tj"]),
        ([], "tj,c", None, ["tj,ckpt", "tj,configmaps"]),
        ([], "tj/te", None, ["tj/teach"]),
        (["tj"], "", None, ["teach", "try"]),
        (["tj", "teach"], "t", None, ["try"]),
        (["tj/teach"], "ck", None, ["ckpt/"]),
        ([], "t", "tj", ["teach", "try"]),
        ([], "spaceship/x", None, []),
    ],
)
def test_completion_offers_kinds_then_names(
    before: list[str], incomplete: str, kind: str | None, offered: list[str]
) -> None:
    assert proposals(before, incomplete, lambda word: list(BEFORE.get(word, ())), kind) == offered


def completed(*words: str) -> list[str]:
    line = {"_STOKER_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    result = CliRunner().invoke(stoker, [], env=line, prog_name="stoker")
    return [line.partition(",")[2] for line in result.output.splitlines() if line]


def test_a_shell_completes_names_of_live_objects(
    server: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_names, "TIMEOUT_S", 60)  # a busy machine takes longer than a person waits
    labelled(server, "pretrain")
    config = ["--kubeconfig", str(server.kubeconfig)]
    assert completed("stoker", "describe", *config, "tj/p") == ["tj/pretrain"]
    assert completed("stoker", "get", *config, "tj", "pre") == ["pretrain"]
    assert completed("stoker", "suspend", *config, "pr") == ["pretrain"]
    nowhere = write_kubeconfig(tmp_path / "nowhere", "http://127.0.0.1:9")
    assert completed("stoker", "get", "--kubeconfig", str(nowhere), "tj", "pre") == []


def test_a_server_that_does_not_answer_and_a_wrong_context_are_named(tmp_path: Path) -> None:
    unreachable = write_kubeconfig(tmp_path / "unreachable", "http://127.0.0.1:9")

    def failed(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(stoker, ["get", "tj", "--kubeconfig", str(unreachable), *words])
        return result.exit_code, result.output

    code, said = failed()
    assert code == 1
    assert f"the API server of the current context of {unreachable} does not answer: " in said
    assert failed("--context", "y") == (64, f"error: {unreachable}: no context 'y', there are: x\n")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("{a: 'b", "no kubeconfig: while scanning a quoted scalar"),
        ("- a\n- b\n", ""),
        ("words\n", ""),
        ("contexts: 3\n", ""),
    ],
    ids=["missing", "cut", "list", "text", "number"],
)
def test_a_file_that_is_no_kubeconfig_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "config"
    if content is not None:
        file.write_text(content)
    result = CliRunner().invoke(stoker, ["get", "tj", "--kubeconfig", str(file)])
    assert (result.exit_code, type(result.exception)) == (64, SystemExit)
    assert f"error: {file}: {said}" in result.output
    assert len(result.output.splitlines()) == 1


def test_a_name_that_belongs_to_another_kind_or_no_job_says_what_was_meant(server: KubeServer) -> None:
    server.do(lambda found: found.job("teach"))
    missing = "does not exist in namespace default"
    assert run(server, "logs", "teach", code=1) == f"error: pod/teach {missing}; did you mean tj/teach?\n"
    assert run(server, "logs", "other", code=1) == f"error: pod/other {missing}\n"
    assert run(server, "plot", "teahc", code=1) == f"error: trainingjob/teahc {missing}; did you mean teach?\n"
    for wrong in ("tj/", "Nope/File.x", "ckpt/teach"):
        assert run(server, "plot", wrong, code=64).startswith(f"error: '{wrong}' is no file and no job: give")
    span = run(server, "plot", "teach", "--after-step", "9", "--until-step", "3", code=2)
    assert "--until-step 3 is not above --after-step 9" in span


def test_credentials_that_have_expired_are_named(tmp_path: Path) -> None:
    config = write_kubeconfig(tmp_path / "config", "http://127.0.0.1:9")
    client = ClusterClient(find_access(str(config), "x"))
    try:
        refused = error_of(401, {"message": "Unauthorized"}, {}, "GET pods")
        assert client.explain(refused) == (
            f"GET pods: Unauthorized: the credentials of context x of {config} are not accepted; "
            "log in again, or choose another --context"
        )
        forbidden = error_of(403, {"message": "pods is forbidden: User a cannot list"}, {}, "GET pods")
        assert client.explain(forbidden) == "GET pods: pods is forbidden: User a cannot list"
    finally:
        client.close()


def test_the_wrong_document_of_two_is_named_by_its_line(server: KubeServer, tmp_path: Path) -> None:
    good = Path(manifest(tmp_path)).read_text()
    lines = good.count("\n")
    two = tmp_path / "two.yaml"
    two.write_text(f"{good}---\nkind: TrainingJob\n")
    assert f"{two}:{lines + 2}: TrainingJob: metadata.name is needed" in run(server, "submit", "-f", str(two), code=64)
    two.write_text(f"{good}---\nkind: {{\n")
    assert f"{two}:{lines + 3}:1: " in run(server, "submit", "-f", str(two), code=64)
    two.write_text(good + "---\n" + good.replace("name: run", "name: bad").replace("totalSteps: 100", "totalSteps: -1"))
    out = run(server, "submit", "-f", str(two), code=64)
    assert "trainingjob/run created" in out
    assert "trainingjob/bad refused: " in out
    assert "totalSteps" in out


class TwoNamespaces:
    """A cluster with one object of a name in each of two namespaces; that of `kept` does not go."""

    place = "all namespaces"

    def listed(self, _kind: Any, _labels: Any) -> list[dict[str, Any]]:
        return []

    def find(self, _target: Any) -> Any:
        raise AssertionError("nothing is looked for")

    def begin_deletion(self, found: dict[str, Any]) -> bool:
        return bool(found["metadata"]["namespace"] != "kept")

    def is_gone(self, found: dict[str, Any]) -> bool:
        return bool(found["metadata"]["namespace"] != "kept")


def test_objects_of_one_name_in_two_namespaces_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    both = [{"kind": "TrainingJob", "metadata": {"name": "run", "namespace": place}} for place in ("kept", "gone")]
    assert delete_all(TwoNamespaces(), both, DeletionWait(timeout_s=0)) == 1
    assert capsys.readouterr().out.splitlines() == ["trainingjob/run is being deleted", "trainingjob/run deleted"]
