"""`python -m stoker.engine.fronts.front_program`: one front of several as a process of its own, started by `pool`.

It serves connections that its parent has accepted, and has its own tokenizer and its own link to the cores. It ends
with its parent. Never imports torch.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from stoker.engine.config import EngineConfig
from stoker.engine.core.core_client import PATIENCE
from stoker.engine.core_start import core_addresses
from stoker.engine.fronts.acceptor import OFFER
from stoker.engine.fronts.link import AskFailed, Link, LinkLost
from stoker.engine.fronts.parts import app_of, front_of, joined, served_names
from stoker.engine.fronts.report import collected
from stoker.engine.http.errors import ApiError
from stoker.engine.http.load_reports import REPORT_S
from stoker.engine.http.load_share import LoadShare
from stoker.engine.http.metrics import FrontMetrics
from stoker.model.tokenizer import Tokenizer
from stoker.pod.collection import spare_from_collection
from stoker.pod.config_file import load
from stoker.pod.control_key import ControlVerifier
from stoker.pod.http import ControlRoute, control_routes, probe_routes
from stoker.pod.serve import Server
from stoker.pod.tracing import tracer_of

log = logging.getLogger("stoker.engine")
POLL_S = 0.05
"""How often the parent is told whether this front serves, if that has changed."""
OFFERS_AT_ONCE = 64


class FrontProgram:
    """One front, run inside an event loop."""

    def __init__(self, config: EngineConfig, arguments: argparse.Namespace) -> None:
        folder = Path(arguments.config).parent
        self.registry = CollectorRegistry()
        self.core = joined(core_addresses(folder, config), PATIENCE, arguments.identity.encode())
        self.metrics = FrontMetrics(self.registry, served_names(config)[0])
        self.tracer = tracer_of("stoker-engine", os.environ)
        self.front = front_of(config, self.core, self.metrics, Tokenizer.open, self.tracer)
        self.front.elsewhere = self._elsewhere
        self.front.served.on_broken = lambda reason: self.link.tell("broken", reason)
        self.front.reports.epoch = arguments.epoch
        self.link = Link(
            socket.socket(fileno=arguments.link),
            {
                "report": self._report,
                "find": self._find,
                "shares": self._take_shares,
                "draining": self._take_draining,
                "lose": self._lose,
                "end": self._end,
            },
        )
        self.channel = socket.socket(fileno=arguments.connections)
        self.channel.setblocking(False)
        self.servers = self._servers(config, os.environ.get("STOKER_POD_UID", ""))
        self._answers_s: float | None = None
        """Time for running answers; set to end the program in good order."""
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Serve until the parent ends this front, or has gone."""
        reading = asyncio.create_task(self.link.run())
        await self.link.opened.wait()
        await self.core.start()
        for server in self.servers:
            await server.start()
        telling = asyncio.create_task(self._tell())
        asyncio.get_running_loop().add_reader(self.channel, self._take_connections)
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
        asyncio.get_running_loop().remove_reader(self.channel)
        if self._answers_s is not None:
            await asyncio.gather(*(server.stop(self._answers_s) for server in self.servers))
        for task in (telling, ending, reading):
            task.cancel()
        await self.core.close()
        self.tracer.close()

    def _servers(self, config: EngineConfig, pod_uid: str) -> list[Server]:
        """A server for each listening socket of the parent: the port, then the control socket."""
        listen = config.listen
        drain = ControlRoute("POST", "/drain", self._drain)
        verifier = ControlVerifier(listen.control_keys, pod_uid, time.time) if listen.control_keys is not None else None
        probes = probe_routes(
            alive=lambda: not self.core.dead,
            ready=lambda: self.front.ready,
            status=self._status,
            registry=self._metrics,
        )
        guarded = control_routes([drain], verifier) if verifier is not None else []
        routes = [[*probes, *guarded]]
        if listen.control_socket is not None:
            routes.append([*probes, *control_routes([drain], None)])
        return [Server(app_of(config, self.front, own, pod_uid), None, listen.limits) for own in routes]

    # Connections.

    def _take_connections(self) -> None:
        for _ in range(OFFERS_AT_ONCE):
            try:
                offer, descriptors, _, _ = socket.recv_fds(self.channel, OFFER.size, 1)
            except (BlockingIOError, InterruptedError):
                return
            if not offer:
                asyncio.get_running_loop().remove_reader(self.channel)  # the parent has gone; so does its link
                return
            place, number = OFFER.unpack(offer)
            for descriptor in descriptors:
                asyncio.create_task(self._serve(place, number, socket.socket(fileno=descriptor)))  # noqa: RUF006

    async def _serve(self, place: int, number: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            await self.servers[place].adopt(connection, number, self._count_closed)
        except OSError:  # the client has gone already
            connection.close()
            self._count_closed()

    def _count_closed(self) -> None:
        try:
            self.channel.send(b".")
        except BlockingIOError:
            asyncio.get_running_loop().call_later(POLL_S, self._count_closed)
        except OSError:
            pass  # the parent has gone

    # What the parent is told and asks.

    async def _tell(self) -> None:
        """Tell the parent on change whether this front serves, and its load."""
        ready, share = None, LoadShare()
        while True:
            if ready != self.front.ready:
                ready = self.front.ready
                if ready:
                    spare_from_collection()
                self.link.tell("state", {"ready": ready})
            if share != self.front.ledger.share:
                share = self.front.ledger.share
                self.link.tell("share", list(share))
            await asyncio.sleep(min(POLL_S, REPORT_S))

    async def _report(self, _: Any) -> Mapping[str, Any]:
        return collected(self.registry, self.metrics.load).to_wire()

    async def _find(self, name: str) -> Mapping[str, Any] | None:
        return await self.front.own_request(name)

    async def _take_shares(self, shares: Sequence[Sequence[Any]]) -> None:
        self.front.reports.others = [LoadShare.from_wire(share) for share in shares]

    async def _take_draining(self, draining: bool) -> None:
        self.front.served.draining = draining

    async def _lose(self, reason: str) -> None:
        self.core.lose(reason)

    async def _end(self, answers_s: float) -> None:
        self._answers_s = answers_s
        self._ending.set()

    # What this front asks the parent.

    async def _ask(self, subject: str, value: Any = None) -> Any:
        try:
            return await self.link.ask(subject, value)
        except LinkLost as error:
            raise HTTPException(503, f"the engine's parent process does not answer: {error}") from error

    async def _status(self) -> Mapping[str, Any]:
        return dict(await self._ask("status"))

    async def _metrics(self) -> bytes:
        return bytes(await self._ask("metrics"))

    async def _drain(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return dict(await self._ask("drain", body))
        except AskFailed as error:
            raise ValueError(str(error)) from error

    async def _elsewhere(self, name: str) -> dict[str, Any] | None:
        try:
            body: dict[str, Any] | None = await self.link.ask("find", name)
        except (LinkLost, AskFailed) as error:
            message = f"The engine's other fronts do not answer: {error}"
            raise ApiError(503, message, code="not_ready", retry_after_s=1) from error
        return body


def main() -> None:
    """Run one front until its parent ends it."""
    parser = argparse.ArgumentParser(prog="python -m stoker.engine.fronts.front_program", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="in the folder of the cores' sockets")
    parser.add_argument("--number", required=True, type=int)
    parser.add_argument("--identity", required=True, help="of the sockets at the cores")
    parser.add_argument("--epoch", required=True, help="of this run of the engine")
    parser.add_argument("--link", required=True, type=int, help="descriptor of the stream to the parent")
    parser.add_argument("--connections", required=True, type=int, help="descriptor that connections come through")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent ends its fronts
    form = f"%(asctime)s %(levelname)s %(name)s front {arguments.number}: %(message)s"
    logging.basicConfig(level=arguments.log_level, format=form)
    asyncio.run(_run(load(EngineConfig, arguments.config), arguments))


async def _run(config: EngineConfig, arguments: argparse.Namespace) -> None:
    await FrontProgram(config, arguments).run()


if __name__ == "__main__":
    main()
