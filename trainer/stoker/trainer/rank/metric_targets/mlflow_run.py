"""MLflow (extra `mlflow`): a folder of files or a tracking server, whichever `tracking_uri` names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stoker.trainer.rank.metric_targets.target import MetricTarget, place_in_errors

JOB_TAG = "stoker.job_uid"
ALLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"
"""Variable without which MLflow 3 refuses a folder."""
MAX_PARAMETER = 500
"""Characters of a parameter's value."""


class MlflowRun(MetricTarget):
    """One run of the experiment for all attempts of a job; a tag with the job's uid finds it again."""

    def __init__(self, fields: Mapping[str, Any], job_uid: str, name: str, parameters: Mapping[str, str]) -> None:
        """`fields`: `logging.mlflow`."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        if fields["tracking_uri"].startswith(("file:", "/", ".")):
            os.environ.setdefault(ALLOW_FILES, "true")
        self._metric = Metric
        self._place = f"logging.mlflow.trackingUri {fields['tracking_uri']}"
        with place_in_errors(self._place):
            self._client = MlflowClient(tracking_uri=fields["tracking_uri"])
            experiment = self._experiment(fields["experiment"])
            self._run_id = self._earlier(experiment, job_uid) or self._new(
                experiment, job_uid, fields.get("run_name") or name, parameters
            )

    def write(self, step: int, numbers: dict[str, float], at: float) -> None:
        metrics = [self._metric(name, value, round(1000 * at), step) for name, value in numbers.items()]
        with place_in_errors(self._place):
            self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, completed: bool) -> None:
        with place_in_errors(self._place):
            self._client.set_terminated(self._run_id, "FINISHED" if completed else "KILLED")

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _earlier(self, experiment: str, job_uid: str) -> str | None:
        for run in self._client.search_runs([experiment], f"tags.`{JOB_TAG}` = '{job_uid}'", max_results=1):
            self._client.update_run(run.info.run_id, status="RUNNING")
            return str(run.info.run_id)
        return None

    def _new(self, experiment: str, job_uid: str, name: str, parameters: Mapping[str, str]) -> str:
        run = self._client.create_run(experiment, run_name=name, tags={JOB_TAG: job_uid})
        for key, value in parameters.items():
            self._client.log_param(run.info.run_id, key, value[:MAX_PARAMETER])
        return str(run.info.run_id)
