"""Access to an API server, read from a kubeconfig: address, TLS, credentials."""

from __future__ import annotations

import base64
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Access:
    """Address, TLS context and credentials of an API server; `tls` is None for a plain address."""

    url: str
    tls: ssl.SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def read_kubeconfig(path: Path) -> Access:
    """Return the access of the current context.

    Raises:
        ValueError: a name in the file leads nowhere.
    """
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    context = _named(path, config, "contexts", config["current-context"])["context"]
    cluster = _named(path, config, "clusters", context["cluster"])["cluster"]
    user = _named(path, config, "users", context["user"])["user"]
    token = user.get("token")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    tls = _tls(path, cluster, user) if cluster["server"].startswith("https:") else None
    return Access(cluster["server"].rstrip("/"), tls, headers)


def write_kubeconfig(path: Path, url: str) -> Path:
    """Write a kubeconfig without credentials, for an address that needs none."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "proxy", "cluster": {"server": url}}],
        "users": [{"name": "proxy", "user": {}}],
        "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
        "current-context": "proxy",
    }
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def _named(path: Path, config: Mapping[str, Any], section: str, name: str) -> Mapping[str, Any]:
    found = next((entry for entry in config[section] if entry["name"] == name), None)
    if found is None:
        raise ValueError(f"{path}: {section} has no {name!r}")
    return dict(found)


def _tls(path: Path, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
    authority = _content(path, cluster, "certificate-authority")
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    certificate, key = _content(path, user, "client-certificate"), _content(path, user, "client-key")
    if certificate and key:
        with tempfile.NamedTemporaryFile() as pair:
            pair.write(certificate + b"\n" + key)
            pair.flush()
            context.load_cert_chain(pair.name)
    return context


def _content(path: Path, section: Mapping[str, Any], name: str) -> bytes | None:
    """Return a PEM text from the file itself (base64) or from the path beside it."""
    if f"{name}-data" in section:
        return base64.b64decode(section[f"{name}-data"])
    return (path.parent / section[name]).read_bytes() if name in section else None
