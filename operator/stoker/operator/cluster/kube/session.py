"""HTTP to one API server: its certificate, ours, the proxy, and connections that stay open.

Made by `connection` of what `credentials` found. The client library's own session would load all of that library, 12 MB
of an operator's memory, for these few lines.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

MAX_CONNECTIONS = 100
READ_BUFFER_BYTES = 1 << 21
"""An event of a watch may be larger than aiohttp's own buffer."""


class ApiSession:
    """Connections to the server of a configuration.

    Raises:
        OSError, ssl.SSLError: a certificate cannot be read.
    """

    def __init__(self, configuration: Any) -> None:
        self._proxy: str | None = configuration.proxy or proxy_of_environment(configuration.host)
        self._server_name: str | None = configuration.tls_server_name
        connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, ssl=_context(configuration))
        # The environment was read above: for each request aiohttp would do so in two threads, and read ~/.netrc too.
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, read_bufsize=READ_BUFFER_BYTES)

    async def close(self) -> None:
        await self._session.close()

    async def request(
        self, method: str, url: str, *, headers: Mapping[str, str], body: Any, limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """Send a request with a JSON body and return the answer with its content still to be read."""
        return await self._session.request(
            method,
            url,
            data=None if body is None else json.dumps(body, separators=(",", ":")).encode(),
            headers=headers,
            timeout=limits,
            proxy=self._proxy,
            server_hostname=self._server_name,
        )


def proxy_of_environment(host: str) -> str | None:
    """The proxy that the environment names for an address; None where it names none or makes an exception."""
    server = urlsplit(host)
    return None if not server.hostname or proxy_bypass(server.netloc) else getproxies().get(server.scheme)


def _context(configuration: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
