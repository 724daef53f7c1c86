"""The last lines of a rank: counted among its own, also while the log is followed."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.cli.cluster_client import ClusterClient, find_access
from stoker.cli.follow_scope import name_of
from stoker.cli.log_selection import LogSelection, has_ended
from stoker.pod.log_source import Look
from testing.gateway.kube_server import KubeServer
from testing.gateway.verbs import run


@pytest.mark.parametrize(("tail", "begun"), [(2, ["two", "three"]), (9, ["one", "two", "three"])])
def test_a_followed_tail_of_a_rank_loses_no_later_line(server: KubeServer, tail: int, begun: list[str]) -> None:
    job = server.do(lambda found: found.put_status(found.job(), phase="Running"))
    there = "[rank 1] one\n[rank 1] two\n[rank 1] three\n[rank 10] other\nstep 1\n"
    pod = server.do(lambda found: found.pod(job, 0, there))
    log = server.do(lambda found: found.folders.log("default", "run-a0-0"))
    selection = LogSelection(follow=True, rank=1, tail=tail)
    later = ["four", "five", "six", "six"]

    def choose(pods: list[Any], now: Any) -> Look:
        return Look(pods, {one["metadata"]["uid"] for one in pods}, has_ended(now))

    client = ClusterClient(find_access(str(server.kubeconfig), None))
    seen: list[str] = []
    for number, (_, lines, _) in enumerate(client.follow_logs(name_of(job), choose, selection, print)):
        seen += [line.removeprefix("[rank 1] ") for line in selection.lines_of(lines)]
        if number == 1:
            with log.open("a") as file:
                file.write("".join(f"[rank 1] {line}\n[rank 0] x\n" for line in later))
            server.do(lambda found: found.put_status(pod, phase="Succeeded"))
            server.do(lambda found: found.put_status(job, phase="Completed"))
    client.close()
    assert seen == begun + later
    again = run(server, "logs", "tj/run", "--rank", "1", "--tail", "3").splitlines()
    assert again == ["[rank 1] five", "[rank 1] six", "[rank 1] six"]
