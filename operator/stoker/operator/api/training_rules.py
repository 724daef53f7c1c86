"""The arithmetic that the sections of a TrainingJob must fulfil together, as CEL whose messages show the numbers."""

from __future__ import annotations

from stoker.operator.api.pod_fields import RANKS_PER_POD
from stoker.operator.api.value import exactly_one, forbidden, rule

_PER_POD = RANKS_PER_POD.replace("self.", "self.workers.")
_RANKS = f"(self.workers.replicas * {_PER_POD})"
_MESH = "(self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.context)"
_WHOLE = f"{_RANKS} % {_MESH} == 0"
_DATA_PARALLEL = f"({_RANKS} / {_MESH})"
_BATCH = f"(self.training.microBatchSize * {_DATA_PARALLEL})"
_TOKENS = "self.training.sequenceLength"
_POWERS_OF_TWO = "[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]"

MESH_FITS = rule(
    _WHOLE,
    "replicas x ranksPerPod must be a multiple of tensor x pipeline x context",
    shown=f"'replicas ' + string(self.workers.replicas) + ' x ranksPerPod ' + string({_PER_POD}) + ' = ' + string({_RANKS})"
    " + ' ranks do not divide by tensor ' + string(self.parallelism.tensor) + ' x pipeline ' + string(self.parallelism.pipeline)"
    f" + ' x context ' + string(self.parallelism.context) + ' = ' + string({_MESH})",
    field=".parallelism",
)
BATCH_FITS = rule(
    f"!({_WHOLE}) || self.training.globalBatchSize % {_BATCH} == 0",
    "globalBatchSize must be a multiple of microBatchSize x data-parallel size",
    shown="'globalBatchSize ' + string(self.training.globalBatchSize) + ' is not a multiple of microBatchSize '"
    f" + string(self.training.microBatchSize) + ' x data-parallel size ' + string({_DATA_PARALLEL}) + ' = ' + string({_BATCH})",
    field=".training.globalBatchSize",
)
REPLICATE_FITS = rule(
    f"!({_WHOLE}) || {_DATA_PARALLEL} % self.parallelism.replicate == 0",
    "replicate must divide the data-parallel size",
    shown=f"'replicate ' + string(self.parallelism.replicate) + ' does not divide data-parallel size ' + string({_DATA_PARALLEL})",
    field=".parallelism.replicate",
)
EXPERT_FITS = rule(
    f"!({_WHOLE}) || {_DATA_PARALLEL} % self.parallelism.replicate != 0"
    f" || {_DATA_PARALLEL} / self.parallelism.replicate * self.parallelism.tensor % self.parallelism.expert == 0",
    "expert must divide data-parallel size / replicate x tensor",
    shown=f"'expert ' + string(self.parallelism.expert) + ' does not divide data-parallel size ' + string({_DATA_PARALLEL}) + ' / replicate '"
    " + string(self.parallelism.replicate) + ' x tensor ' + string(self.parallelism.tensor) + ' = '"
    f" + string({_DATA_PARALLEL} / self.parallelism.replicate * self.parallelism.tensor)",
    field=".parallelism.expert",
)
POWER_OF_TWO = rule(
    f"self.training.deterministic != 'AnyDataParallel' || !({_WHOLE}) || {_DATA_PARALLEL} in {_POWERS_OF_TWO}",
    "deterministic AnyDataParallel needs a data-parallel size that is a power of two",
    shown=f"'deterministic AnyDataParallel needs a data-parallel size that is a power of two, got ' + string({_DATA_PARALLEL})",
    field=".training.deterministic",
)
SEQUENCE_PARALLEL = rule(
    "!self.parallelism.sequenceParallel || self.parallelism.tensor > 1",
    "sequenceParallel spreads over the tensor ranks: it needs tensor above 1",
    field=".parallelism.sequenceParallel",
)
CONTEXT_FITS = rule(
    f"{_TOKENS} % self.parallelism.context == 0",
    "sequenceLength must be a multiple of context",
    shown=f"'sequenceLength ' + string({_TOKENS}) + ' is not a multiple of context ' + string(self.parallelism.context)",
    field=".training.sequenceLength",
)
HEADS_FIT = rule(
    "!has(self.model) || self.model.numHeads % self.parallelism.tensor == 0",
    "numHeads must be a multiple of tensor",
    shown="'numHeads ' + string(self.model.numHeads) + ' is not a multiple of tensor ' + string(self.parallelism.tensor)",
    field=".model.numHeads",
)
LAYERS_FIT = rule(
    "!has(self.model) || self.model.numLayers >= self.parallelism.pipeline",
    "every pipeline stage needs a layer",
    shown="'numLayers ' + string(self.model.numLayers) + ' are fewer than pipeline ' + string(self.parallelism.pipeline)",
    field=".model.numLayers",
)
EXPERTS_FIT = rule(
    "self.parallelism.expert == 1 || !has(self.model)"
    " || (has(self.model.numExperts) && self.model.numExperts % self.parallelism.expert == 0)",
    "expert parallelism needs a model whose numExperts is a multiple of expert",
    shown="has(self.model.numExperts) ? 'numExperts ' + string(self.model.numExperts) + ' is not a multiple of expert '"
    " + string(self.parallelism.expert) : 'expert ' + string(self.parallelism.expert) + ' needs a model with experts, got architecture ' + self.model.architecture",
    field=".parallelism.expert",
)
POSITIONS_FIT = rule(
    f"!has(self.model) || !has(self.model.maxPositionEmbeddings) || {_TOKENS} <= self.model.maxPositionEmbeddings",
    "sequenceLength is above maxPositionEmbeddings",
    shown=f"'sequenceLength ' + string({_TOKENS}) + ' is above maxPositionEmbeddings ' + string(self.model.maxPositionEmbeddings)",
    field=".training.sequenceLength",
)
WARMUP_FITS = rule(
    "!has(self.training.totalSteps) || self.optimization.warmupSteps <= self.training.totalSteps",
    "warmupSteps is above totalSteps",
    shown="'warmupSteps ' + string(self.optimization.warmupSteps) + ' is above totalSteps ' + string(self.training.totalSteps)",
    field=".optimization.warmupSteps",
)
ELASTIC_FITS = rule(
    "!has(self.run.elastic) || (self.run.elastic.minWorkers <= self.workers.replicas && self.workers.replicas <= self.run.elastic.maxWorkers)",
    "workers.replicas must lie between run.elastic.minWorkers and maxWorkers",
    shown="'replicas ' + string(self.workers.replicas) + ' does not lie between run.elastic.minWorkers '"
    " + string(self.run.elastic.minWorkers) + ' and maxWorkers ' + string(self.run.elastic.maxWorkers)",
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
    EXPERTS_FIT,
    POSITIONS_FIT,
    WARMUP_FITS,
    ELASTIC_FITS,
)
