"""Text that was written for a pod, as it must read on this machine: mount paths, DNS names of pods and Services,
`listen`. Pure.

Mounted JSON is rewritten value by value, every other text by patterns at the borders of words.

Called by `pod_command` and `local_cluster`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.operator.cluster.local.addresses import Addresses, Host

ANY_HOST = ("0.0.0.0", "::", "")
ANY_TCP = "tcp://0.0.0.0:"
TCP_PORTS = 8
"""Ports in a row of one that a program listens at over ZeroMQ: its copies take those behind it."""
CONFIG_SUFFIXES = (".json", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".env")
"""Suffixes of files that are rewritten; others are data of the user."""
_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_DNS = re.compile(
    rf"(?<![\w.-])(?P<first>{_LABEL})\.(?P<rest>{_LABEL}(?:\.{_LABEL})*?)\.svc(?:\.cluster\.local)?(?::(?P<port>\d+))?(?![\w-]|\.\w)"
)


@dataclass(frozen=True)
class Rewriter:
    """Rewrites texts for one pod."""

    namespace: str
    own: Host
    paths: Mapping[str, str]
    """Path in the container -> path here, for mounts and the termination log."""
    addresses: Addresses
    subdomain: str = ""
    """The pod's own headless Service: `<pod>.<subdomain>` is a name too."""
    services: frozenset[str] = frozenset()
    """Services of the namespace that exist, for their short names."""

    def text(self, text: str) -> str:
        """Rewrite mount paths and names in a command, a variable or a text file."""
        return self._names(self._mounts(text))

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Rewrite every variable; MASTER_PORT follows the address of MASTER_ADDR."""
        rewritten = {name: self.text(value) for name, value in variables.items()}
        master, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT", "")
        if master and port.isdigit():
            host = self._host_of(master)
            if host is not None:
                rewritten["MASTER_ADDR"] = self.addresses.ip(host)
                rewritten["MASTER_PORT"] = str(self.addresses.port(host, int(port)))
        return rewritten

    def file(self, name: str, content: str) -> str:
        """Rewrite a mounted configuration file; data passes unchanged."""
        if not name.endswith(CONFIG_SUFFIXES):
            return content
        if name.endswith(".json"):
            try:
                return json.dumps(self.json(json.loads(content)), indent=1) + "\n"
            except ValueError:
                return content
        return self.text(content)

    def json(self, value: Any) -> Any:
        """Rewrite every string in a JSON value; `listen` and `tcp://0.0.0.0:PORT` get this pod's address and port."""
        if isinstance(value, str):
            return self._tcp(value) if value.startswith(ANY_TCP) else self.text(value)
        if isinstance(value, list):
            return [self.json(inner) for inner in value]
        if isinstance(value, Mapping):
            return {key: self._listen(inner) if key == "listen" else self.json(inner) for key, inner in value.items()}
        return value

    def _tcp(self, text: str) -> str:
        """Rewrite `tcp://0.0.0.0:PORT`, where a program listens over ZeroMQ."""
        port = text.removeprefix(ANY_TCP)
        if not port.isdecimal():
            return self.text(text)
        return f"tcp://{self.addresses.ip(self.own)}:{self.addresses.port(self.own, int(port), TCP_PORTS)}"

    def _listen(self, section: Any) -> Any:
        if isinstance(section, str):
            return self._listen_text(section)
        rewritten = self.json(section)
        if not isinstance(rewritten, dict) or rewritten.get("host") not in ANY_HOST:
            return rewritten
        rewritten["host"] = self.addresses.ip(self.own)
        if isinstance(rewritten.get("port"), int):
            rewritten["port"] = self.addresses.port(self.own, rewritten["port"])
        return rewritten

    def _listen_text(self, text: str) -> str:
        """Rewrite `0.0.0.0:PORT`. With `ports` the program takes a free port itself and tells others which."""
        host, _, port = text.rpartition(":")
        if host not in ("0.0.0.0", "[::]") or not port.isdigit():
            return self.text(text)
        return f"{self.addresses.ip(self.own)}:{0 if self.addresses.mode == 'ports' else port}"

    def _mounts(self, text: str) -> str:
        if not self.paths:
            return text
        longest_first = sorted(self.paths, key=len, reverse=True)
        pattern = "|".join(re.escape(path) for path in longest_first)
        return re.sub(rf"(?:(?<![\w/.-])|(?<=file://))({pattern})(?![\w.-])", lambda found: self.paths[found[1]], text)

    def _names(self, text: str) -> str:
        text = _DNS.sub(self._replacement(lambda found: self._dns_host(found["first"], found["rest"])), text)
        if self.subdomain:
            short = rf"(?<![\w.-])(?P<first>{_LABEL})\.{re.escape(self.subdomain)}(?::(?P<port>\d+))?(?![\w-]|\.\w)"
            text = re.sub(short, self._replacement(lambda found: Host("pod", self.namespace, found["first"])), text)
        for service in sorted(self.services, key=len, reverse=True):
            # only as the host of a URL: a bare word may be anything
            short = rf"(?<=://)(?P<first>{re.escape(service)})(?::(?P<port>\d+))?(?![\w.-])"
            text = re.sub(short, self._replacement(lambda found: Host("service", self.namespace, found["first"])), text)
        return text

    def _replacement(self, host_of: Callable[[re.Match[str]], Host | None]) -> Callable[[re.Match[str]], str]:
        def replace(found: re.Match[str]) -> str:
            host = host_of(found)
            if host is None:
                return found[0]
            ip = self.addresses.ip(host)
            return f"{ip}:{self.addresses.port(host, int(found['port']))}" if found["port"] else ip

        return replace

    def _dns_host(self, first: str, rest: str) -> Host | None:
        """Parse `service.namespace.svc` or `pod.service.namespace.svc`."""
        parts = rest.split(".")
        if len(parts) == 1:
            return Host("service", parts[0], first)
        return Host("pod", parts[1], first) if len(parts) == 2 else None

    def _host_of(self, name: str) -> Host | None:
        found = _DNS.fullmatch(name)
        if found is not None:
            return self._dns_host(found["first"], found["rest"])
        first, _, rest = name.partition(".")
        return Host("pod", self.namespace, first) if self.subdomain and rest == self.subdomain else None
