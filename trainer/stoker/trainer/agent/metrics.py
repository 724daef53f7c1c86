"""Prometheus metrics of the run, computed from `RunState` at each scrape of `/metrics`.

Read-only; made by the agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from stoker.trainer.agent.run_state import RunState
from stoker.trainer.protocol.messages import StepEvent

STEP_GAUGES = (
    ("stoker_trainer_step", "step", "Last finished optimizer step."),
    ("stoker_trainer_total_steps", "total_steps", "Steps that the run takes."),
    ("stoker_trainer_trained_tokens", "tokens", "Tokens trained since the start of the run, over all ranks."),
    ("stoker_trainer_loss", "loss", "Training loss of the last step."),
    ("stoker_trainer_learning_rate", "learning_rate", "Learning rate of the last step."),
    ("stoker_trainer_grad_norm", "grad_norm", "Global norm of the gradient before clipping."),
    ("stoker_trainer_tokens_per_second", "tokens_per_s", "Tokens per second over all ranks."),
    ("stoker_trainer_step_seconds", "step_s", "Duration of the last step."),
    ("stoker_trainer_eta_seconds", "eta_s", "Expected time to the last step."),
    ("stoker_trainer_skipped_steps", "skipped_steps", "Steps so far whose update was not applied."),
    ("stoker_trainer_loss_scale", "loss_scale", "Factor of the loss in the next step, with fp16."),
)


ROUTER_GAUGES = (
    ("stoker_trainer_router_balance_loss", "router_balance_loss", "Load-balance loss of the routers, last step."),
    ("stoker_trainer_router_z_loss", "router_z_loss", "Z loss of the routers, last step."),
    ("stoker_trainer_expert_imbalance", "expert_imbalance", "Rows of the fullest expert over the mean, worst layer."),
)
"""Only of models with experts."""


def registry_of(state: RunState, clock: Callable[[], float]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RunMetrics(state, clock))
    return registry


def router_metrics(step: StepEvent) -> Iterator[Metric]:
    """Yield the metrics of routers and experts; none for a model without them."""
    if step.expert_tokens is None:
        return
    for name, attribute, text in ROUTER_GAUGES:
        yield GaugeMetricFamily(name, text, value=float(getattr(step, attribute)))
    family = GaugeMetricFamily(
        "stoker_trainer_expert_tokens", "Rows of each expert in the last step, over all layers.", labels=["expert"]
    )
    for expert, tokens in enumerate(step.expert_tokens):
        family.add_metric([str(expert)], tokens)
    yield family


class _RunMetrics(Collector):
    def __init__(self, state: RunState, clock: Callable[[], float]) -> None:
        self.state, self.clock = state, clock

    def collect(self) -> Iterator[Metric]:
        if self.state.last_step is not None:
            for name, attribute, text in STEP_GAUGES:
                if (value := getattr(self.state.last_step, attribute)) is not None:
                    yield GaugeMetricFamily(name, text, value=float(value))
            yield from router_metrics(self.state.last_step)
        if self.state.last_validation is not None:
            yield GaugeMetricFamily(
                "stoker_trainer_validation_loss", "Last validation loss.", value=self.state.last_validation.loss
            )
        yield self._source_samples()
        yield self._phase()
        yield self._hang_metric()
        yield self._saves()
        yield self._nodes()
        yield self._stragglers()
        yield self._startup()

    def _source_samples(self) -> Metric:
        family = GaugeMetricFamily(
            "stoker_trainer_source_samples", "Sequences trained of a data source.", labels=["source"]
        )
        for source in self.state.sources:
            family.add_metric([source["name"]], source["samples"])
        return family

    def _phase(self) -> Metric:
        family = GaugeMetricFamily("stoker_trainer_phase", "1 for the pod's phase.", labels=["phase"])
        family.add_metric([self.state.phase], 1)
        return family

    def _hang_metric(self) -> Metric:
        family = GaugeMetricFamily(
            "stoker_trainer_rank_silent_seconds", "Time since the rank's last sign.", labels=["rank"]
        )
        for rank, state in self.state.ranks.items():
            family.add_metric([str(rank)], max(0.0, self.clock() - state.progressed_at))
        return family

    def _saves(self) -> Metric:
        family = CounterMetricFamily(
            "stoker_trainer_saves", "Saves of this attempt by how they ended.", labels=["state"]
        )
        for ending, count in self.state.save_counts.items():
            family.add_metric([ending], count)
        return family

    def _nodes(self) -> Metric:
        family = GaugeMetricFamily(
            "stoker_trainer_node_reachable", "1 for a pod of the gang that answers.", labels=["node_rank"]
        )
        for node in self.state.nodes():
            family.add_metric([str(node.node_rank)], float(node.reachable))
        return family

    def _stragglers(self) -> Metric:
        text = "Time that a straggler computes in a step over the median of its peers; only of ranks that are named."
        family = GaugeMetricFamily("stoker_trainer_straggler_ratio", text, labels=["rank"])
        for found in self.state.stragglers:
            family.add_metric([str(found["rank"])], found["busy_s"] / found["typical_s"])
        return family

    def _startup(self) -> Metric:
        text = "Unix time at which all ranks of the pod had reached a moment of their start."
        family = GaugeMetricFamily("stoker_trainer_startup_timestamp_seconds", text, labels=["moment"])
        for name, value in self.state.startup.status().items():
            if name.endswith("_at"):
                family.add_metric([name.removesuffix("_at")], value)
        return family
