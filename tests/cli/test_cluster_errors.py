"""What goes wrong before a cluster answers: kubeconfigs, dead servers, what answers in their place; and refusals."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from stoker.cli.main import stoker
from stoker.pod.error_text import text_of
from testing.gateway.kube_server import KubeServer, write_kubeconfig
from testing.gateway.verbs import run
from testing.operator.canned_server import canned_server

EVERY_VERB = (
    "get tj", "describe tj/x", "logs tj/x", "delete tj x", "save x", "suspend x", "resume x", "plot x", "top", "backup",
)  # fmt: skip


def verb(kubeconfig: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(stoker, [words[0], "--kubeconfig", str(kubeconfig), *words[1:]])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


CONTEXTS: dict[str, Any] = {
    "apiVersion": "v1", "kind": "Config", "clusters": [], "users": [],
    "contexts": [{"name": name, "context": {"cluster": "c", "user": "u"}} for name in ("b", "a")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{{", "no kubeconfig: while parsing a flow node"),
        ("", "no kubeconfig: it needs clusters, users, contexts and current-context"),
        ("- a", "no kubeconfig: it needs clusters, users, contexts and current-context"),
        ("contexts: [7]", "no kubeconfig: it needs clusters, users, contexts and current-context"),
        (json.dumps(CONTEXTS), "no current-context: choose one by --context, there are: a, b"),
        (json.dumps({**CONTEXTS, "current-context": "c"}), "no context 'c', there are: a, b"),
    ],
    ids=["no-yaml", "empty", "list", "wrong-item", "no-current", "gone"],
)
def test_a_kubeconfig_that_does_not_serve_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    code, said = verb(file, "get", "tj")
    assert (code, said.startswith(f"error: {file}: {words}"), said.count("\n")) == (64, True, 1), said


def test_a_kubeconfig_without_a_current_context_serves_with_one(server: KubeServer, tmp_path: Path) -> None:
    config = json.loads(server.kubeconfig.read_text())
    del config["current-context"]
    file = tmp_path / "config"
    file.write_text(json.dumps(config))
    assert verb(file, "get", "tj", "--context", "x") == (0, "no trainingjobs in namespace default\n")


def test_a_server_that_is_not_there_is_named_by_every_verb(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        port = taken.getsockname()[1]
        file = write_kubeconfig(tmp_path / "config", f"http://127.0.0.1:{port}")
        for words in EVERY_VERB:
            code, said = verb(file, *words.split())
            assert code == 1, words
            assert said.startswith(f"error: the API server of the current context of {file} does not answer: "), said
            assert said.endswith(f"cannot connect to 127.0.0.1:{port}: Connection refused\n"), said


@pytest.mark.parametrize(
    ("code", "body", "words"),
    [
        (404, b"404 page not found\n", "does not know this kind; install Stoker's definitions (docs/install.md), or"),
        (200, b"<html>log in</html>", "the answer is not JSON: is this an API server?"),
        (200, b"[]", "the answer is not a JSON object: is this an API server?"),
        (503, b'{"kind": "Status", "message": "shutting down"}', "shutting down"),
        (403, b'{"kind": "Status", "message": "eve cannot list trainingjobs"}', "eve cannot list trainingjobs"),
        (401, b'{"kind": "Status", "message": "Unauthorized"}', "are not accepted; log in again, or choose another"),
    ],
    ids=["no-definitions", "html", "list", "unavailable", "forbidden", "unknown-token"],
)
def test_what_answers_in_place_of_objects_is_said(tmp_path: Path, code: int, body: bytes, words: str) -> None:
    with canned_server(code, body) as url:
        file = write_kubeconfig(tmp_path / "config", url)
        for asked in EVERY_VERB if code == 404 else EVERY_VERB[:1]:
            ended, said = verb(file, *asked.split())
            assert (ended, words in said) == (1, True), (asked, said)


def test_a_name_without_its_kind_gets_a_hint(server: KubeServer) -> None:
    for asked in ("get", "describe"):
        assert run(server, asked, "teach", code=64).endswith(". An object is named as KIND/NAME: tj/teach\n")


def test_a_rank_that_a_job_does_not_have_is_refused(server: KubeServer) -> None:
    job = server.do(lambda found: found.put_status(found.job(), phase="Running", worldSize=2))
    server.do(lambda found: found.pod(job, 0, "[rank 1] one\n[rank 0] none\n"))
    assert run(server, "logs", "tj/run", "--rank", "1") == "[rank 1] one\n"
    for words in ((), ("-f",)):
        refused = run(server, "logs", "tj/run", "--rank", "2", *words, code=1)
        assert refused == "error: --rank 2: the job has ranks 0 to 1\n"


@pytest.mark.parametrize("target", ["nodes/local", "svc/chat"])
def test_what_has_no_pods_has_no_log_to_wait_for(server: KubeServer, target: str) -> None:
    assert f"'{target}' has no pods of its own; give a pod, or tj/" in run(server, "logs", target, "-f", code=2)


def test_a_checkpoint_that_a_job_does_not_have_is_answered_with_those_it_has(server: KubeServer) -> None:
    job = server.do(lambda found: found.put_status(found.job(), phase="Failed"))
    for step, verified in ((50, True), (60, False)):
        server.do(lambda found, s=step, v=verified: found.checkpoint(job, s, verified=v))  # type: ignore[misc]
    for wanted, why in (("run-5", "job run has no checkpoint run-5"), ("run-60", "checkpoint run-60 is not verified")):
        said = run(server, "resume", "run", "--from", wanted, code=1)
        assert (said.startswith(f"error: {why}"), said.endswith("; verified: run-50\n")) == (True, True), said


def test_top_of_nothing_says_so(server: KubeServer) -> None:
    assert run(server, "top", "jobs") == "no jobs that have not ended in namespace default\n"
    assert run(server, "top", "deployments", "-A") == "no deployments that have not ended in any namespace\n"


def test_an_error_without_words_says_its_type() -> None:
    assert (text_of(TimeoutError()), text_of(OSError("a\n b"))) == ("TimeoutError", "a b")
