"""The arithmetic that the sections of a TrainingJob must fulfil together, as CEL whose messages show the numbers."""

from __future__ import annotations

from stoker.operator.api.pod_fields import ranks_per_pod
from stoker.operator.api.value import exactly_one, forbidden, rule

_MESH = {
    "w": "self.workers",
    "p": "self.parallelism",
    "n": ranks_per_pod("w"),
    "r": "w.replicas * n",
    "m": "p.tensor * p.pipeline * p.context",
}
"""Names for CEL: r ranks in all, m of them in one model replica."""

_DATA_PARALLEL = {**_MESH, "d": "r % m == 0 ? r / m : 0"}
"""d: data-parallel size, 0 where it is not whole (which has its own message)."""

_POWERS_OF_TWO = "[0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]"

MESH_FITS = rule(
    "r % m == 0",
    "replicas x ranksPerPod must be a multiple of tensor x pipeline x context",
    shown="replicas {w.replicas} x ranksPerPod {n} = {r} ranks do not divide by"
    " tensor {p.tensor} x pipeline {p.pipeline} x context {p.context} = {m}",
    names=_MESH,
    field=".parallelism",
)
BATCH_FITS = rule(
    "d == 0 || t.globalBatchSize % (t.microBatchSize * d) == 0",
    "globalBatchSize must be a multiple of microBatchSize x data-parallel size",
    shown="globalBatchSize {t.globalBatchSize} is not a multiple of"
    " microBatchSize {t.microBatchSize} x data-parallel size {d} = {t.microBatchSize * d}",
    names={**_DATA_PARALLEL, "t": "self.training"},
    field=".training.globalBatchSize",
)
REPLICATE_FITS = rule(
    "d % p.replicate == 0",
    "replicate must divide the data-parallel size",
    shown="replicate {p.replicate} does not divide data-parallel size {d}",
    names=_DATA_PARALLEL,
    field=".parallelism.replicate",
)
EXPERT_FITS = rule(
    "d % p.replicate != 0 || d / p.replicate * p.tensor % p.expert == 0",
    "expert must divide data-parallel size / replicate x tensor",
    shown="expert {p.expert} does not divide data-parallel size {d} / replicate {p.replicate} x tensor {p.tensor} = {d / p.replicate * p.tensor}",
    names=_DATA_PARALLEL,
    field=".parallelism.expert",
)
POWER_OF_TWO = rule(
    f"self.training.deterministic != 'AnyDataParallel' || d in {_POWERS_OF_TWO}",
    "deterministic AnyDataParallel needs a data-parallel size that is a power of two",
    shown="deterministic AnyDataParallel needs a data-parallel size that is a power of two, got {d}",
    names=_DATA_PARALLEL,
    field=".training.deterministic",
)
SEQUENCE_PARALLEL = rule(
    "!self.parallelism.sequenceParallel || self.parallelism.tensor > 1",
    "sequenceParallel spreads over the tensor ranks: it needs tensor above 1",
    field=".parallelism.sequenceParallel",
)
CONTEXT_FITS = rule(
    "self.training.sequenceLength % self.parallelism.context == 0",
    "sequenceLength must be a multiple of context",
    shown="sequenceLength {self.training.sequenceLength} is not a multiple of context {self.parallelism.context}",
    field=".training.sequenceLength",
)
HEADS_FIT = rule(
    "!has(self.model) || self.model.numHeads % self.parallelism.tensor == 0",
    "numHeads must be a multiple of tensor",
    shown="numHeads {self.model.numHeads} is not a multiple of tensor {self.parallelism.tensor}",
    field=".model.numHeads",
)
LAYERS_FIT = rule(
    "!has(self.model) || self.model.numLayers >= self.parallelism.pipeline",
    "every pipeline stage needs a layer",
    shown="numLayers {self.model.numLayers} are fewer than pipeline {self.parallelism.pipeline}",
    field=".model.numLayers",
)
EXPERTS_THERE = rule(
    "self.parallelism.expert == 1 || !has(self.model) || has(self.model.numExperts)",
    "expert parallelism needs a model with experts",
    shown="expert {self.parallelism.expert} needs a model with experts, got architecture {self.model.architecture}",
    field=".parallelism.expert",
)
EXPERTS_FIT = rule(
    "!has(self.model) || !has(self.model.numExperts) || self.model.numExperts % self.parallelism.expert == 0",
    "numExperts must be a multiple of expert",
    shown="numExperts {self.model.numExperts} is not a multiple of expert {self.parallelism.expert}",
    field=".parallelism.expert",
)
POSITIONS_FIT = rule(
    "!has(self.model) || !has(self.model.maxPositionEmbeddings)"
    " || self.training.sequenceLength <= self.model.maxPositionEmbeddings",
    "sequenceLength is above maxPositionEmbeddings",
    shown="sequenceLength {self.training.sequenceLength} is above maxPositionEmbeddings {self.model.maxPositionEmbeddings}",
    field=".training.sequenceLength",
)
WARMUP_FITS = rule(
    "!has(self.training.totalSteps) || self.optimization.warmupSteps <= self.training.totalSteps",
    "warmupSteps is above totalSteps",
    shown="warmupSteps {self.optimization.warmupSteps} is above totalSteps {self.training.totalSteps}",
    field=".optimization.warmupSteps",
)
ELASTIC_FITS = rule(
    "!has(self.run.elastic)"
    " || (self.run.elastic.minWorkers <= self.workers.replicas && self.workers.replicas <= self.run.elastic.maxWorkers)",
    "workers.replicas must lie between run.elastic.minWorkers and maxWorkers",
    shown="replicas {self.workers.replicas} does not lie between"
    " run.elastic.minWorkers {self.run.elastic.minWorkers} and maxWorkers {self.run.elastic.maxWorkers}",
    field=".workers.replicas",
)
MODEL_STAYS = forbidden(
    "has(self.model) == has(oldSelf.model)", "model and modelFrom cannot replace each other: make a new TrainingJob"
)

SPEC_RULES = (
    exactly_one("model", "modelFrom"),
    MODEL_STAYS,
    MESH_FITS,
    BATCH_FITS,
    REPLICATE_FITS,
    EXPERT_FITS,
    POWER_OF_TWO,
    SEQUENCE_PARALLEL,
    CONTEXT_FITS,
    HEADS_FIT,
    LAYERS_FIT,
    EXPERTS_THERE,
    EXPERTS_FIT,
    POSITIONS_FIT,
    WARMUP_FITS,
    ELASTIC_FITS,
)
