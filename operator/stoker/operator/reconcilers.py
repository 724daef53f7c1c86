"""Which function reconciles which kind. A new kind adds one line."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.operator.operator import Reconciler
from stoker.operator.reconcile.checkpoint import reconcile_checkpoint
from stoker.operator.reconcile.enginepool import reconcile_enginepool
from stoker.operator.reconcile.inferencedeployment import reconcile_inferencedeployment
from stoker.operator.reconcile.trainingjob import reconcile_trainingjob

RECONCILERS: Mapping[str, Reconciler] = {
    "TrainingJob": reconcile_trainingjob,
    "Checkpoint": reconcile_checkpoint,
    "InferenceDeployment": reconcile_inferencedeployment,
    "EnginePool": reconcile_enginepool,
}
