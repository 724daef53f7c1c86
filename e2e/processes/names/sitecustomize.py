"""Names of pods in the processes of a `process_node`: `POD.SERVICE.NAMESPACE.svc` is the address in its file.

Python imports this module at its start, before any of ours: it takes the place of the cluster's DNS server.
"""

import json
import os
import socket

_resolve = socket.getaddrinfo


def _getaddrinfo(host, *given, **named):  # type: ignore[no-untyped-def]
    """Resolve a name of the cluster, or leave it to the machine."""
    parts = host.split(".") if isinstance(host, str) else []
    if len(parts) == 4 and parts[3] == "svc":
        with open(os.environ["STOKER_TEST_ADDRESSES"]) as file:  # noqa: PTH123 - imports as little as possible
            host = json.load(file)["hosts"].get(f"pod/{parts[2]}/{parts[0]}", host)
    return _resolve(host, *given, **named)


if "STOKER_TEST_ADDRESSES" in os.environ:
    socket.getaddrinfo = _getaddrinfo
