"""Run one router of an InferenceDeployment: forward OpenAI requests to its engines.

python -m stoker.router --config router.json
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.collection import spare_from_collection
from stoker.pod.command_line import CommandParser
from stoker.pod.config_file import load
from stoker.pod.control_key import ControlVerifier
from stoker.pod.serve import Server, bind_tcp, bind_unix
from stoker.pod.termination_message import TerminationMessage
from stoker.pod.tracing import NoTracer, Tracer, tracer_of
from stoker.router.app import Router
from stoker.router.backend import Backend
from stoker.router.config import RouterConfig
from stoker.router.node import NOWHERE, Node
from stoker.router.policy import Policy
from stoker.router.snapshot import BackendSnapshot, load_snapshot

log = logging.getLogger("stoker.router")
QUIET_S = 0.5
"""After SIGTERM, the time without a request after which no client is expected to send one."""
LINGER_S = 5.0
"""After SIGTERM in a cluster, the time for which new connections still come: a node sends them until it has learnt that
the pod goes, seconds later where it is busy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM, and return an exit code of docs/exit-codes.md."""
    parser = CommandParser(
        prog="python -m stoker.router", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="configuration as JSON (stoker.router.config)")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config: RouterConfig | None = None
    tracer: Tracer = NoTracer()
    try:
        tracer = tracer_of("stoker-router", os.environ)
        config = load(RouterConfig, arguments.config)
        home = Node(os.environ.get("STOKER_NODE_NAME", ""), os.environ.get("STOKER_ZONE", ""))
        pod_uid = os.environ.get("STOKER_POD_UID", "")
        asyncio.run(run(config, load_snapshot(config.backends_file), pod_uid=pod_uid, home=home, tracer=tracer))
        word = TerminationMessage(cause=Cause.INTERRUPTED, detail="stopped on SIGTERM after its requests")
    except ValueError as error:  # ConfigError is one
        word = TerminationMessage(cause=Cause.CONFIG_INVALID, detail=str(error))
    except OSError as error:
        word = TerminationMessage(cause=Cause.INTERNAL, detail=str(error))
    tracer.close()
    if word.cause is not Cause.INTERRUPTED:
        log.error("%s: %s", word.cause, word.detail)
    if config is not None and config.termination_log is not None:
        word.write(config.termination_log)
    return EXIT_CODES[word.cause]


async def run(
    config: RouterConfig,
    snapshot: BackendSnapshot,
    *,
    pod_uid: str,
    home: Node = NOWHERE,
    tracer: Tracer = NoTracer(),  # noqa: B008 - it has no state
    policy: Policy[Backend] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain within the grace period. `policy`: not the one of the configuration."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    keys = config.listen.control_keys
    verifier = ControlVerifier(keys, pod_uid, time.time) if keys else None
    router = Router(config, pod_uid=pod_uid, verifier=verifier, home=home, tracer=tracer, policy=policy)
    servers = _servers(config, router)
    router.start(snapshot)
    for server in servers:
        await server.start()
    spare_from_collection()
    log.info("listening on %s:%d", config.listen.host, servers[0].port)
    await stop.wait()
    log.info("draining")
    deadline = time.monotonic() + config.grace_period_s - 1
    await router.drain(QUIET_S, max(deadline - time.monotonic(), 0), least_s=linger_s(os.environ))
    for server in servers:
        await server.stop(max(deadline - time.monotonic(), 0))
    await router.stop()


def linger_s(environment: Mapping[str, str]) -> float:
    """Return how long to serve after SIGTERM at least; only a cluster's pods have the address of its API server."""
    return LINGER_S if "KUBERNETES_SERVICE_HOST" in environment else 0.0


def _servers(config: RouterConfig, router: Router) -> list[Server]:
    servers = [Server(router.app, bind_tcp(config.listen.host, config.listen.port), config.listen.limits)]
    if config.listen.control_socket is not None:
        Path(config.listen.control_socket).parent.mkdir(parents=True, exist_ok=True)
        servers.append(Server(router.control_app, bind_unix(config.listen.control_socket), config.listen.limits))
    return servers
