"""The cluster-wide rights that `watch` needs, asked for before the first list.

An informer waits for a right that comes later, so without this a missing one would keep the operator from its work with
no other sign than the informer's warnings. Called by `program`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from stoker.operator.cluster.interface import ClusterError, Forbidden, Unauthorized
from stoker.operator.cluster.kinds import KINDS
from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.cluster.kube.paths import collection
from stoker.operator.service.config import OperatorConfig
from stoker.pod.config_file import ConfigError

log = logging.getLogger(__name__)

_WITHOUT = {
    "Node": "lost nodes are then noticed when the cluster evicts their pods, and gangs are not placed",
    "Pod": "gangs are then not placed",
}
"""What an operator without a kind does not do, by kind."""


def cluster_wide(config: OperatorConfig) -> tuple[str, ...]:
    """The kinds that the configuration has listed in the whole cluster beside those of `namespaces`."""
    watch = config.watch
    if not watch.nodes:
        return ()
    return ("Node", "Pod") if watch.pods and not config.namespaces else ("Node",)


async def check_rights(connection: ApiConnection, kinds: Sequence[str]) -> None:
    """Ask for one object of each kind. An answer that says nothing about rights is logged; the informers try again.

    Raises:
        ConfigError: the API server refuses a kind; names the right, and the value that does without it.
    """
    for name in kinds:
        kind = KINDS[name]
        try:
            await connection.request("GET", collection(kind, None), resource=kind.plural, query={"limit": "1"})
        except ClusterError as error:
            if isinstance(error, Forbidden) and not isinstance(error, Unauthorized):
                raise ConfigError(_missing(name, kind.plural, error)) from error
            log.warning("the right to list %s is not known: %s", kind.plural, error)


def _missing(name: str, plural: str, error: ClusterError) -> str:
    return (
        f"watch.{plural} is true, and the operator may not list {plural} in the whole cluster: grant get, list and "
        f"watch by a ClusterRole, or set watch.{plural} to false ({_WITHOUT[name]}): {error}"
    )
