"""The table of kinds and their reconcilers. A new kind adds one line.

Constant; read by `program` and by the local supervisor.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker.operator.loop.operator import Reconciler
from stoker.operator.reconcile.checkpoint.reconcile import reconcile_checkpoint
from stoker.operator.reconcile.enginepool.reconcile import reconcile_enginepool
from stoker.operator.reconcile.inferencedeployment.reconcile import reconcile_inferencedeployment
from stoker.operator.reconcile.trainingjob.reconcile import reconcile_trainingjob

RECONCILERS: Mapping[str, Reconciler] = {
    "TrainingJob": reconcile_trainingjob,
    "Checkpoint": reconcile_checkpoint,
    "InferenceDeployment": reconcile_inferencedeployment,
    "EnginePool": reconcile_enginepool,
}
