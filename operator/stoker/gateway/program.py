"""The gateway as a program: one HTTP server in front of one cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets

from stoker.gateway.cluster.access import open_access
from stoker.gateway.cluster.prometheus import Prometheus
from stoker.gateway.config import GatewayConfig
from stoker.gateway.http.app import make_app
from stoker.gateway.http.caller import Gateway
from stoker.pod.serve import Server, bind_tcp

log = logging.getLogger("stoker.gateway")

STOP_S = 5.0


async def run(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set.

    Raises:
        ValueError: the cluster cannot be found.
        OSError: the address cannot be bound.
    """
    access = open_access(config.cluster)
    gateway = Gateway(config, access, Prometheus(config.prometheus_url), lambda: secrets.token_hex(16))
    server = Server(make_app(gateway), bind_tcp(config.listen.host, config.listen.port), config.listen.limits)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(access.close)
        await server.start()
        stack.push_async_callback(server.stop, STOP_S)
        log.info("the gateway listens on http://%s:%d", config.listen.host, server.port)
        await stop.wait()
