"""The service account of this pod: the address of the API server, its certificate, and a token that is read anew.

It has the attributes of the client library's Configuration that are read of it. A kubeconfig is left to the library.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TOKEN_S = 60.0
"""Time after which the token is read again: the kubelet replaces it long before it expires."""


class ServiceAccount:
    """The credentials of a pod.

    Raises:
        ValueError: this is no pod of a cluster; the message names what is missing.
        OSError: a file cannot be read.
    """

    cert_file: str | None = None
    key_file: str | None = None
    verify_ssl = True
    tls_server_name: str | None = None
    proxy: str | None = None

    def __init__(
        self,
        folder: Path = SERVICE_ACCOUNT,
        *,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = _address(os.environ if environment is None else environment)
        self.ssl_ca_cert = str(folder / "ca.crt")
        self._token_file = folder / "token"
        self._clock = clock
        if not Path(self.ssl_ca_cert).stat().st_size:
            raise ValueError(f"{self.ssl_ca_cert} is empty")
        self._read()

    async def auth_settings(self) -> dict[str, dict[str, str]]:
        """Return the header that authenticates a request, with the newest token."""
        if self._clock() >= self._read_again_at:
            self._read()
        return {"BearerToken": {"key": "authorization", "value": f"Bearer {self._token}"}}

    def _read(self) -> None:
        token = self._token_file.read_text(encoding="ascii").strip()
        if not token:
            raise ValueError(f"{self._token_file} is empty")
        self._token = token
        self._read_again_at = self._clock() + TOKEN_S


def _address(environment: Mapping[str, str]) -> str:
    names = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
    for name in names:
        if not environment.get(name):
            raise ValueError(f"the variable {name} is missing, as it is outside of a cluster's pods")
    host, port = (environment[name] for name in names)
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
