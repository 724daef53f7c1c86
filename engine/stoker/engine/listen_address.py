"""The address at which an engine takes blocks from others: read from `transfer.listen`, checked."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import ip_address

from stoker.pod.config_file import ConfigError


def parse_listen(listen: str, *, keyed: bool) -> tuple[str, int]:
    """Host and port of `transfer.listen`. `keyed`: a secret protects it, so that it may be reached from outside."""
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65533:
        raise ConfigError(f"transfer.listen must be host:port with a port from 0 to 65533, got {listen!r}")
    if not keyed and not is_loopback(host):
        message = "without one only loopback addresses are allowed, such as 127.0.0.1"
        raise ConfigError(f"transfer.listen {listen!r} needs transfer.key_file; {message}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach the address."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"
