"""The routes of an agent: on the pod's address with signed control calls, on the Unix socket without signatures."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client.registry import Collector
from starlette.routing import BaseRoute

from stoker.pod.api_document import document_route
from stoker.pod.control_key import ControlVerifier
from stoker.pod.http import control_routes, probe_routes
from stoker.trainer.agent.api_document import agent_document
from stoker.trainer.agent.control import Control
from stoker.trainer.agent.history import history_route
from stoker.trainer.agent.metrics import registry_of
from stoker.trainer.agent.run_state import RunState
from stoker.trainer.protocol.config import TrainerConfig


def agent_routes(
    config: TrainerConfig, state: RunState, control: Control, clock: Callable[[], float], gpus: Collector
) -> tuple[list[BaseRoute], list[BaseRoute]]:
    """The routes of the pod's address and those of the Unix socket. `gpus` yields the metrics of the pod's GPUs."""
    registry = registry_of(state, clock)
    registry.register(gpus)
    shared: list[BaseRoute] = [
        *probe_routes(
            alive=lambda: True,
            ready=lambda: state.phase not in ("Loading", "Exited"),
            status=state.status,
            registry=registry,
        ),
        history_route(config.logging.jsonl),
        document_route(agent_document()),
    ]
    signed: list[BaseRoute] = []
    if config.listen.control_keys is not None:
        verifier = ControlVerifier(config.listen.control_keys, state.pod.pod_uid, time.time)
        signed = control_routes(control.routes(), verifier)
    return [*shared, *signed], [*shared, *control_routes(control.routes(), None)]
