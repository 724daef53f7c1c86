"""A wait goes on while the cluster does not answer, and ends with a refusal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from stoker.cli.cluster_client import ClusterClient, find_access
from stoker.cli.deletion import DeletionWait, delete_all
from stoker.cli.follow_scope import name_of
from stoker.cli.label_selector import parse_selector
from stoker.cli.listing import Listing, Watch
from stoker.cli.log_selection import LogSelection, has_ended
from stoker.cli.outage import Outage
from stoker.cli.output_format import Format
from stoker.cli.targets import parse_targets
from stoker.cli.text_style import PLAIN
from stoker.operator.cluster.interface import ClusterError, Forbidden, NotFound, ServerError, TooManyRequests
from stoker.pod.log_source import Look
from stoker.pod.patience import LONGEST_S
from testing.gateway import kube_server
from testing.gateway.cut_line import CutLine, cut_line
from testing.gateway.kube_server import KubeServer, write_kubeconfig
from testing.gateway.world import JOB_SPEC


class Answers:
    """Gives what it is told, one after the other."""

    def __init__(self, *answers: ClusterError | str) -> None:
        self.answers = list(answers)

    def __call__(self) -> str:
        answer = self.answers.pop(0)
        if isinstance(answer, str):
            return answer
        raise answer


def test_an_outage_is_told_once_and_when_it_is_over() -> None:
    said: list[str] = []
    outage = Outage(said.append, lambda error: f"no answer: {error}")
    question = Answers(ClusterError("cut"), ServerError("503"), TooManyRequests("429"), "a", "b")
    assert [outage.ask(question) for _ in range(5)] == [None, None, None, "a", "b"]
    assert said == ["no answer: cut; asking again for 5 minutes", "the cluster answers again"]


def test_an_outage_that_lasts_ends_the_wait() -> None:
    time_s = 0.0
    outage = Outage(lambda _: None, monotonic=lambda: time_s)
    assert outage.ask(Answers(ClusterError("cut"))) is None
    time_s = LONGEST_S + 1
    with pytest.raises(ClusterError, match="cut"):
        outage.ask(Answers(ClusterError("cut")))


@pytest.mark.parametrize("refusal", [Forbidden("no right"), NotFound("gone")])
def test_a_refusal_ends_the_wait_at_once(refusal: ClusterError) -> None:
    with pytest.raises(type(refusal)):
        Outage(lambda _: None).ask(Answers(refusal))


def test_an_answer_that_is_insisted_on_comes_after_the_outage() -> None:
    pauses: list[float] = []
    question = Answers(ClusterError("cut"), "", "b")
    outage = Outage(lambda _: None)
    assert outage.insist(question, pauses.append) == "", "an empty answer is one"
    assert pauses == [1.0]


class Unreliable:
    """A cluster with one job, which does not answer every other time."""

    place = "namespace default"

    def __init__(self) -> None:
        self.num_asked = 0
        self.jobs = [job_at("one", "1")]

    def listed(self, *_: object) -> list[dict[str, Any]]:
        self._fail_now_and_then()
        return self.jobs

    def find(self, _: object) -> Any:
        raise AssertionError("nothing is looked for")

    def begin_deletion(self, _: object) -> bool:
        return False

    def is_gone(self, _: object) -> bool:
        self._fail_now_and_then()
        return self.num_asked > 4

    def _fail_now_and_then(self) -> None:
        self.num_asked += 1
        if self.num_asked % 2 == 0:
            raise ClusterError("cut")


def job_at(name: str, version: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "resourceVersion": version}
    return {"kind": "TrainingJob", "metadata": metadata, "spec": {}, "status": {"phase": "Running"}}


def test_a_watch_goes_on_after_an_outage(capsys: pytest.CaptureFixture[str]) -> None:
    cluster, said, num_pauses = Unreliable(), list[str](), 0

    def sleep(_: float) -> None:
        nonlocal num_pauses
        num_pauses += 1
        cluster.jobs = [job_at("one", str(num_pauses))]
        if num_pauses == 5:
            raise KeyboardInterrupt

    listing = Listing(cluster, parse_targets(["tj"]), parse_selector(None))
    watch = Watch(listing, Format.NAME, PLAIN, ask=Outage(said.append).ask, sleep=sleep)
    with pytest.raises(KeyboardInterrupt):
        watch.for_ever()
    assert capsys.readouterr().out.splitlines() == ["trainingjob/one"] * 3
    assert said == ["cut; asking again for 5 minutes", "the cluster answers again"] * 2


@pytest.mark.parametrize(("waits", "printed"), [(True, "deleted"), (False, "is being deleted")])
def test_a_deletion_that_meets_an_outage_is_asked_for_again(
    capsys: pytest.CaptureFixture[str], waits: bool, printed: str
) -> None:
    class Down(Unreliable):
        def begin_deletion(self, found: Any) -> bool:
            self._fail_now_and_then()
            begun.append(found["metadata"]["name"])
            return False

    cluster, said, begun = Down(), list[str](), list[str]()
    wait = DeletionWait(Outage(said.append).ask, sleep=lambda _: None, for_end=waits)
    assert delete_all(cluster, [job_at("one", "1"), job_at("two", "1")], wait) == 0
    assert begun == ["one", "two"]
    assert capsys.readouterr().out.splitlines() == [f"trainingjob/one {printed}", f"trainingjob/two {printed}"]
    assert said[:2] == ["cut; asking again for 5 minutes", "the cluster answers again"]


def test_a_deletion_is_given_up_when_its_time_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    class Down(Unreliable):
        def begin_deletion(self, _: object) -> bool:
            raise ClusterError("cut")

    wait = DeletionWait(Outage(lambda _: None).ask, timeout_s=0, sleep=lambda _: None)
    assert delete_all(Down(), [job_at("one", "1")], wait) == 1
    assert capsys.readouterr().err == "trainingjob/one is not deleted: the cluster did not answer in 0 s\n"


def test_a_refused_deletion_is_not_asked_for_again() -> None:
    class Refusing(Unreliable):
        def begin_deletion(self, _: object) -> bool:
            self.num_asked += 1
            raise Forbidden("no")

    cluster = Refusing()
    with pytest.raises(Forbidden):
        delete_all(cluster, [job_at("one", "1")], DeletionWait(Outage(lambda _: None).ask))
    assert cluster.num_asked == 1


def test_a_deletion_that_is_repeated_leaves_a_new_object_of_the_name(server: KubeServer, tmp_path: Path) -> None:
    """The answer to the first request was lost, and meanwhile another has created the job anew."""
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", server.url)
    client = ClusterClient(find_access(str(kubeconfig), None))
    metadata = {"name": "run", "namespace": "default"}
    job = {"apiVersion": "stoker.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": JOB_SPEC}
    try:
        first = client.create(job)
        client.begin_deletion(first)
        new = client.create(job)
        assert client.begin_deletion(first) is True
        assert client.get("TrainingJob", "run")["metadata"]["uid"] == new["metadata"]["uid"]
    finally:
        client.close()


def test_the_wait_for_a_deletion_goes_on_after_an_outage(capsys: pytest.CaptureFixture[str]) -> None:
    cluster, said = Unreliable(), list[str]()
    wait = DeletionWait(Outage(said.append).ask, sleep=lambda _: None)
    assert delete_all(cluster, [job_at("one", "1")], wait) == 0
    assert capsys.readouterr().out == "trainingjob/one deleted\n"
    assert said == ["cut; asking again for 5 minutes", "the cluster answers again"] * 2


def test_a_followed_log_goes_on_after_its_line_was_cut(server: KubeServer, tmp_path: Path) -> None:
    """It is cut among the lines of a pod that runs, and once more before the end of the job is seen."""
    job = server.do(lambda found: found.put_status(found.job(), phase="Running"))
    pod = server.do(lambda found: found.pod(job, 0, "one\ntwo\n"))
    log = server.do(lambda found: found.folders.log("default", "run-a0-0"))
    seen, said = list[str](), list[str]()

    def choose(pods: list[Any], now: Any) -> Look:
        return Look(pods, {pod["metadata"]["uid"] for pod in pods}, has_ended(now))

    with server_line(server) as line:
        client = ClusterClient(find_access(str(write_kubeconfig(tmp_path / "config", line.url)), None))

        def say(text: str) -> None:
            said.append(text)
            if len(said) == 1:
                with log.open("a") as file:
                    file.write("three\n")
                line.mend()
            elif len(said) == 3:
                server.do(lambda found: found.put_status(pod, phase="Succeeded"))
                server.do(lambda found: found.put_status(job, phase="Completed"))
                line.mend()

        for _, lines, _ in client.follow_logs(name_of(job), choose, LogSelection(), say):
            seen += lines
            if lines:
                line.cut()
        client.close()
    assert seen == ["one", "two", "three"]
    assert [text.rpartition(";")[2] for text in said] == [
        " asking again for 5 minutes",
        "the cluster answers again",
    ] * 2
    assert said[0].startswith("the API server of the current context of ")


class ServerLine:
    """A line to the server that is cut and mended from the test's thread."""

    def __init__(self, line: CutLine, loop: asyncio.AbstractEventLoop) -> None:
        self._line, self._loop, self.url = line, loop, f"http://127.0.0.1:{line.port}"

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._line.cut)

    def mend(self) -> None:
        self._loop.call_soon_threadsafe(self._line.mend)


@contextlib.contextmanager
def server_line(server: KubeServer) -> Iterator[ServerLine]:
    where = urlsplit(server.url)
    line = cut_line(str(where.hostname), int(where.port or 0))
    entered = asyncio.run_coroutine_threadsafe(enter(line), server.loop).result(kube_server.LONGEST_S)
    try:
        yield ServerLine(entered, server.loop)
    finally:
        asyncio.run_coroutine_threadsafe(leave(line), server.loop).result(kube_server.LONGEST_S)


async def enter(line: Any) -> CutLine:
    found: CutLine = await line.__aenter__()
    return found


async def leave(line: Any) -> None:
    await line.__aexit__(None, None, None)
