"""`stoker local logs`: the logs of the pods of an object of the embedded cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from stoker.cli.exit_status import FAILED, INTERRUPTED
from stoker.cli.local_options import ask, namespace_option, open_client, state_option
from stoker.cli.local_source import LocalSource
from stoker.cli.log_options import log_options
from stoker.cli.log_selection import LogSelection, NoSuchLog, has_ended
from stoker.cli.object_names import TARGETS
from stoker.cli.object_source import Missing, missing_text
from stoker.cli.supervisor_client import SupervisorClient
from stoker.cli.targets import Target, belongs_to, fail, kind_of, log_target, prefixed
from stoker.pod.whole_lines import WholeLines

LOOK_S = 0.3


@click.command(epilog="\b\nExamples:\n  stoker local logs tj/teach -f\n  stoker local logs teach-7eedf-a0-0")
@click.argument("target", type=TARGETS)
@log_options
@namespace_option
@state_option
def logs(target: str, selection: LogSelection, namespace: str, state: Path | None) -> None:
    """Print the log of a pod.

    TARGET is a pod, or KIND/NAME for all pods of a job, checkpoint or deployment. Of a job these are the pods of its
    newest attempt; with --follow those of the attempts that come after it too, until the job has ended.
    """
    wanted = log_target(target)
    try:
        LocalLogs(LocalSource(open_client(state), namespace), wanted, selection).print_all()
    except NoSuchLog as error:
        fail(str(error), FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


class LocalLogs:
    """Reads logs part by part from the supervisor, which answers from an offset. A log outlives its pod."""

    def __init__(
        self,
        source: LocalSource,
        target: Target,
        selection: LogSelection,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.source, self.target, self.selection, self.sleep = source, target, selection, sleep
        self._reading: dict[str, _Reading] = {}
        self._several = False

    def print_all(self) -> None:
        """Print until the logs have ended; without `follow` once."""
        while True:
            done = self._look()
            for name, reading in self._reading.items():
                self._print(name, reading)
            if not self.selection.follow:
                return
            if done and all(reading.ended for reading in self._reading.values()):
                return
            self.sleep(LOOK_S)

    def _look(self) -> bool:
        """Find pods that are new; whether no others will come."""
        owner = self.source.find(self.target)
        if self.target.kind.name == "Pod":
            self._reading.setdefault(str(self.target.name), _Reading())  # the log may be there without the pod
            return True
        if isinstance(owner, Missing):
            if not self._reading:
                fail(missing_text(self.source, self.target, owner), FAILED)
            return True
        self.selection.check_rank(owner)
        uid = owner["metadata"]["uid"]
        own = [pod for pod in self.source.listed(kind_of("pod"), {}) if belongs_to(uid, pod)]
        if not own and not self.selection.follow:
            fail(f"{self.target.kind.name.lower()}/{self.target.name} has no pods", FAILED)
        only = self.selection.attempt is not None or self.selection.previous
        chosen = self.selection.pods_of(own) if own or only else []
        self._several = self._several or len(chosen) > 1
        for pod in chosen:
            self._reading.setdefault(pod["metadata"]["name"], _Reading())
        return only or has_ended(owner)

    def _print(self, pod: str, reading: _Reading) -> None:
        """Print what is new of one log."""
        choose = self.selection.last_of if reading.first else self.selection.lines_of
        lines = choose(reading.new_lines(self.source.client, str(self.source.namespace), pod))
        reading.first = False
        for line in lines:
            click.echo(prefixed(line, f"[{pod}] " if self._several else ""))


class _Reading:
    """How far one log is read."""

    def __init__(self) -> None:
        self.offset = 0
        self.ended = False
        self.first = True
        self._cutter = WholeLines()

    def new_lines(self, client: SupervisorClient, namespace: str, pod: str) -> list[str]:
        """Read everything that was written since the last call."""
        lines: list[str] = []
        while not self.ended:
            part = ask(lambda: client.logs(namespace, pod, self.offset))
            lines += self._cutter.cut(part["text"].encode())
            self.offset = part["offset"]
            self.ended = part["ended"]
            if not part["text"]:
                break
        return [*lines, *self._cutter.last()] if self.ended else lines
