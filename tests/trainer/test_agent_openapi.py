"""The OpenAPI document of an agent is true."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.applications import Starlette

from stoker.pod.config_file import parse
from stoker.pod.gpu_metrics import gpu_metrics
from stoker.trainer.agent.api_document import agent_document
from stoker.trainer.agent.control import Control
from stoker.trainer.agent.pod_rank import find_pod_rank
from stoker.trainer.agent.routes import agent_routes
from stoker.trainer.agent.run_state import RunState
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.protocol.messages import PhaseEvent
from testing.openapi.fuzz import fuzz, labels
from testing.openapi.send import Sender, sender

DOCUMENT = agent_document()


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sender]:
    """The routes of the Unix socket of an agent that trains, whose log has a few steps."""
    log = tmp_path_factory.mktemp("agent") / "log.jsonl"
    log.write_text("".join(f'{{"kind": "step", "step": {n}, "loss": 2.5}}\n' for n in range(1, 40)))
    config = parse(TrainerConfig, {
        "job": {"name": "job", "uid": "uid", "writer": "0a1b2c3d"}, "termination_log": "/dev/null", "work_dir": "none",
        "model": {"vocab_size": 259}, "training": {"total_steps": 5}, "checkpoint": {"root": "/nowhere"},
        "data": {"sources": [{"name": "a", "path": "/nowhere"}]}, "logging": {"jsonl": str(log)},
    })  # fmt: skip
    state = RunState(config.job, find_pod_rank(config, {"STOKER_POD_UID": "pod"}), started_at=0)
    state.apply(0, PhaseEvent(phase="Training", message="Training"), clock=1.0, unix=1.0)
    control = Control(state, lambda _: True, lambda *_: None)
    _, private = agent_routes(config, state, control, lambda: 2.0, gpu_metrics({}))
    with sender(Starlette(routes=private)) as found:
        yield found


@pytest.mark.parametrize("label", labels(DOCUMENT))
def test_every_answer_is_documented(agent: Sender, label: str) -> None:
    seen = fuzz(DOCUMENT, label, agent)
    assert 200 in seen or label.startswith("POST"), seen


def test_good_control_calls_are_accepted(agent: Sender) -> None:
    for path, body in (("/checkpoint", {"id": "s-1"}), ("/drain", {"id": "d-1", "mode": "suspend", "deadline_s": 3})):
        answer = agent(method="POST", url=path, json=body)
        assert (answer.status_code, answer.json()["id"]) == (202, body["id"])


def test_the_document_is_served_and_names_every_route(agent: Sender) -> None:
    assert agent(method="GET", url="/openapi.json").json() == DOCUMENT
    assert "/drain" in DOCUMENT["paths"]
    assert "/metrics/history" in DOCUMENT["paths"]
