"""Which function reconciles which kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from stoker.operator.plan import Observed, Plan
from stoker.operator.reconcile.checkpoint import reconcile_checkpoint
from stoker.operator.reconcile.enginepool import reconcile_enginepool
from stoker.operator.reconcile.inferencedeployment import reconcile_inferencedeployment
from stoker.operator.reconcile.trainingjob import reconcile_trainingjob
from stoker.operator.settings import Settings

Reconciler = Callable[[Observed, Settings, datetime], Plan]

RECONCILERS: Mapping[str, Reconciler] = {
    "TrainingJob": reconcile_trainingjob,
    "Checkpoint": reconcile_checkpoint,
    "InferenceDeployment": reconcile_inferencedeployment,
    "EnginePool": reconcile_enginepool,
}
