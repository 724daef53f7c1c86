"""Arithmetic over the sections of a TrainingJob, as CEL rules whose messages show the numbers."""

from __future__ import annotations

from stoker.operator.api.pod_fields import ranks_per_pod
from stoker.operator.api.value import exactly_one, first_of, forbidden, rule

_MESH = {
    "w": "self.workers",
    "p": "self.parallelism",
    "r": f"w.replicas * {ranks_per_pod('w')}",
    "m": "p.tensor * p.pipeline * p.context",
}
"""Names for CEL: r ranks in all, m of them in one model replica.

Where r % m is 0, r / m is the data-parallel size; elsewhere `MESH_FITS` has the message and the other rules hold. The
names are long, so rules that need them are checked together."""

MESH_FITS = first_of(
    (
        "r % m == 0",
        "replicas {w.replicas} x ranksPerPod {r / w.replicas} = {r} ranks do not divide by"
        " tensor {p.tensor} x pipeline {p.pipeline} x context {p.context} = {m}",
    ),
    ("r % (m * p.replicate) == 0", "replicate {p.replicate} does not divide data-parallel size {r / m}"),
    (
        "r * p.tensor % (m * p.replicate * p.expert) == 0",
        "expert {p.expert} does not divide data-parallel size {r / m} / replicate {p.replicate} x tensor {p.tensor}"
        " = {r / m / p.replicate * p.tensor}",
    ),
    message="replicas x ranksPerPod must be a multiple of tensor x pipeline x context, and replicate must divide the"
    " data-parallel size, and expert the data-parallel size / replicate x tensor",
    names=_MESH,
    field=".parallelism",
)
BATCH_FITS = first_of(
    (
        "r % m != 0 || t.globalBatchSize * m % (t.microBatchSize * r) == 0",
        "globalBatchSize {t.globalBatchSize} is not a multiple of"
        " microBatchSize {t.microBatchSize} x data-parallel size {r / m} = {t.microBatchSize * r / m}",
    ),
    (
        f"t.deterministic != 'AnyDataParallel' || r % m != 0 || {2**32} % (r / m) == 0",
        "deterministic AnyDataParallel needs a data-parallel size that is a power of two, got {r / m}",
    ),
    message="globalBatchSize must be a multiple of microBatchSize x data-parallel size, and"
    " deterministic AnyDataParallel needs a data-parallel size that is a power of two",
    names={**_MESH, "t": "self.training"},
    field=".training",
)
STAGES_FIT_SCHEDULE = rule(
    "self.pipeline > 1 && self.pipelineSchedule == 'Interleaved' ? self.stagesPerRank > 1"
    " : self.stagesPerRank == 1 || self.pipeline > 1 && self.pipelineSchedule == 'ZeroBubble'",
    "stagesPerRank is above 1 with pipelineSchedule Interleaved, 1 with GPipe, OneFOneB or without a pipeline",
    shown="stagesPerRank {self.stagesPerRank}: above 1 with pipelineSchedule Interleaved, 1 with GPipe, OneFOneB or"
    " without a pipeline",
    field=".stagesPerRank",
)
BUDGET_IS_SELECTIVE = rule(
    "!has(self.activationBudgetGiB) || self.activationCheckpointing == 'selective'",
    "activationBudgetGiB needs activationCheckpointing selective",
    shown="activationBudgetGiB needs activationCheckpointing selective, got {self.activationCheckpointing}",
    field=".activationBudgetGiB",
)
SEQUENCE_PARALLEL = first_of(
    ("!p.sequenceParallel || p.tensor > 1", "sequenceParallel needs tensor above 1"),
    (
        "!p.sequenceParallel || t.microBatchSize * t.sequenceLength % (p.context * p.tensor) == 0",
        "sequenceParallel: microBatchSize {t.microBatchSize} x sequenceLength {t.sequenceLength} is not a multiple of"
        " context {p.context} x tensor {p.tensor}",
    ),
    message="sequenceParallel needs tensor above 1, and microBatchSize x sequenceLength a multiple of context x tensor",
    names={"p": "self.parallelism", "t": "self.training"},
    field=".parallelism.sequenceParallel",
)
LENGTH_FITS = first_of(
    (
        "t.sequenceLength % self.parallelism.context == 0",
        "sequenceLength {t.sequenceLength} is not a multiple of context {self.parallelism.context}",
    ),
    (
        "!has(self.model) || !has(self.model.maxPositionEmbeddings)"
        " || t.sequenceLength <= self.model.maxPositionEmbeddings",
        "sequenceLength {t.sequenceLength} is above maxPositionEmbeddings {self.model.maxPositionEmbeddings}",
    ),
    message="sequenceLength must be a multiple of context, and at most maxPositionEmbeddings",
    names={"t": "self.training"},
    field=".training.sequenceLength",
)
HEADS_FIT = first_of(
    *(
        (
            f"!has(self.model) || !has(self.model.{name}) || self.model.{name} % n == 0",
            f"{name} {{self.model.{name}}} is not a multiple of tensor {{n}}",
        )
        for name in ("numHeads", "numKvHeads", "intermediateSize")
    ),
    (
        "!has(self.model) || p.contextMethod != 'Ulysses' || self.model.numHeads % (n * p.context) == 0",
        "numHeads {self.model.numHeads} is not a multiple of tensor {n} x context {p.context} with contextMethod"
        " Ulysses",
    ),
    message="numHeads, numKvHeads and intermediateSize must be multiples of tensor, and"
    " with contextMethod Ulysses numHeads of tensor x context",
    names={"n": "self.parallelism.tensor", "p": "self.parallelism"},
    field=".model",
)
LAYERS_FIT = rule(
    "!has(self.model) || self.model.numLayers >= self.parallelism.pipeline * self.parallelism.stagesPerRank",
    "every pipeline stage needs a layer",
    shown="numLayers {self.model.numLayers} are fewer than pipeline {self.parallelism.pipeline}"
    " x stagesPerRank {self.parallelism.stagesPerRank}",
    field=".model.numLayers",
)
EXPERTS_FIT = first_of(
    (
        "e == 1 || !has(self.model) || has(self.model.numExperts)",
        "expert {e} needs a model with experts, got architecture {self.model.architecture}",
    ),
    (
        "e == 1 || !has(self.model) || self.model.numExperts % e == 0",
        "numExperts {self.model.numExperts} is not a multiple of expert {e}",
    ),
    message="expert needs a model whose numExperts is a multiple of it",
    names={"e": "self.parallelism.expert"},
    field=".parallelism.expert",
)
WARMUP_FITS = rule(
    "!has(self.training.totalSteps) || self.optimization.warmupSteps <= self.training.totalSteps",
    "warmupSteps is above totalSteps",
    shown="warmupSteps {self.optimization.warmupSteps} is above totalSteps {self.training.totalSteps}",
    field=".optimization.warmupSteps",
)
ELASTIC_FITS = rule(
    "!has(self.run.elastic) || [self.run.elastic].all(e,"
    " e.minWorkers <= self.workers.replicas && self.workers.replicas <= e.maxWorkers)",
    "workers.replicas must lie between run.elastic.minWorkers and maxWorkers",
    shown="replicas {self.workers.replicas} does not lie between"
    " run.elastic.minWorkers {self.run.elastic.minWorkers} and maxWorkers {self.run.elastic.maxWorkers}",
    field=".workers.replicas",
)
MODEL_STAYS = forbidden(
    "has(self.model) == has(oldSelf.model) && has(self.lora) == has(oldSelf.lora)",
    "model, modelFrom and lora are fixed: make a new TrainingJob",
)
ADAPTERS_NEED_WEIGHTS = rule("!has(self.lora) || has(self.modelFrom)", "lora needs modelFrom", field=".lora")

SPEC_RULES = (
    exactly_one("model", "modelFrom"),
    MODEL_STAYS,
    ADAPTERS_NEED_WEIGHTS,
    MESH_FITS,
    BATCH_FITS,
    SEQUENCE_PARALLEL,
    LENGTH_FITS,
    HEADS_FIT,
    LAYERS_FIT,
    EXPERTS_FIT,
    WARMUP_FITS,
    ELASTIC_FITS,
)
