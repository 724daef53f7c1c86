"""Manifests that admission must refuse, each with the whole text of the refusal.

One table for the embedded cluster and for an API server. An entry is (id, kind, {path: value or DELETE} applied to a
good manifest, text after `KIND.stoker.dev "x" is invalid: `).
"""

from __future__ import annotations

import copy
import re
from typing import Any

DELETE = object()

JOB: dict[str, Any] = {
    "apiVersion": "stoker.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "x", "namespace": "default"},
    "spec": {
        "model": {
            "architecture": "llama",
            "vocabSize": 512,
            "hiddenSize": 64,
            "intermediateSize": 128,
            "numLayers": 2,
            "numHeads": 4,
            "numKvHeads": 2,
            "maxPositionEmbeddings": 4096,
        },
        "workers": {"replicas": 2, "ranksPerPod": 2},
        "training": {"totalSteps": 10, "globalBatchSize": 8, "microBatchSize": 1, "sequenceLength": 64},
        "data": {"sources": [{"name": "text", "path": "/data/text"}]},
        "checkpoint": {"storage": {"claimName": "checkpoints"}},
    },
}
CHECKPOINT: dict[str, Any] = {
    "apiVersion": "stoker.dev/v1alpha1",
    "kind": "Checkpoint",
    "metadata": {"name": "x", "namespace": "default"},
    "spec": {"source": {"jobRef": {"name": "teach"}}},
}
DEPLOYMENT: dict[str, Any] = {
    "apiVersion": "stoker.dev/v1alpha1",
    "kind": "InferenceDeployment",
    "metadata": {"name": "x", "namespace": "default"},
    "spec": {"model": {"checkpointRef": {"name": "base"}}, "pools": [{"name": "main"}]},
}
POOL: dict[str, Any] = {
    "apiVersion": "stoker.dev/v1alpha1",
    "kind": "EnginePool",
    "metadata": {"name": "x", "namespace": "default"},
    "spec": {
        "replicas": 2,
        "revisions": [{"name": "a", "template": {"config": {"a": 1}, "pod": {"spec": {}}}, "share": 100}],
    },
}
GOOD = {"TrainingJob": JOB, "Checkpoint": CHECKPOINT, "InferenceDeployment": DEPLOYMENT, "EnginePool": POOL}

_IMPORT = {"storage": {"claimName": "archive"}, "folder": "step-00000400.0a1b2c3d"}
_CANARY = {"type": "canary", "canary": {"steps": [{"percent": 10}]}}

BAD: list[tuple[str, str, dict[str, Any], str]] = [
    # what is missing, unknown or of the wrong type
    ("no spec", "TrainingJob", {"spec": DELETE}, "spec: Required value"),
    ("no training", "TrainingJob", {"spec.training": DELETE}, "spec.training: Required value"),
    ("no claim", "TrainingJob", {"spec.checkpoint": DELETE}, "spec.checkpoint: Required value"),
    ("unknown section", "TrainingJob", {"spec.trainning": {}}, 'spec.trainning: unknown field "spec.trainning" (did you mean training?)'),
    ("unknown field in a list", "TrainingJob", {"spec.data.sources[0].wieght": 2}, 'spec.data.sources[0].wieght: unknown field "spec.data.sources[0].wieght" (did you mean weight?)'),
    ("snake case", "TrainingJob", {"spec.training.global_batch_size": 8}, 'spec.training.global_batch_size: unknown field "spec.training.global_batch_size" (did you mean globalBatchSize?)'),
    ("text for a number", "TrainingJob", {"spec.workers.replicas": "two"}, 'spec.workers.replicas: Invalid value: "string": spec.workers.replicas in body must be of type integer: "string"'),
    ("a float rate", "TrainingJob", {"spec.optimization.learningRate": 3e-4}, 'spec.optimization.learningRate: Invalid value: "number": spec.optimization.learningRate in body must be of type string: "number" (a text is needed: write "0.0003" with its quotes)'),
    ("a list for an object", "TrainingJob", {"spec.model": []}, 'spec.model: Invalid value: "array": spec.model in body must be of type object: "array"'),
    # values out of range
    ("no steps", "TrainingJob", {"spec.training.totalSteps": 0}, "spec.training.totalSteps: Invalid value: 0: spec.training.totalSteps in body should be greater than or equal to 1"),
    ("zero stage 4", "TrainingJob", {"spec.memory.zeroStage": 4}, "spec.memory.zeroStage: Invalid value: 4: spec.memory.zeroStage in body should be less than or equal to 3"),
    ("unknown precision", "TrainingJob", {"spec.memory.precision": "int4"}, 'spec.memory.precision: Unsupported value: "int4": supported values: "fp32", "fp16", "bf16", "fp8"'),
    ("unknown architecture", "TrainingJob", {"spec.model.architecture": "gpt2"}, 'spec.model.architecture: Unsupported value: "gpt2": supported values: "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe"'),
    ("a rate that is no number", "TrainingJob", {"spec.optimization.learningRate": "fast"}, "spec.optimization.learningRate: Invalid value: \"fast\": spec.optimization.learningRate in body should match '^\\d+(\\.\\d+)?([eE][-+]?\\d\\d?)?$'"),
    ("a rate with a line break", "TrainingJob", {"spec.optimization.learningRate": "3e-4\n"}, "spec.optimization.learningRate: Invalid value: \"3e-4\\n\": spec.optimization.learningRate in body should match '^\\d+(\\.\\d+)?([eE][-+]?\\d\\d?)?$'"),
    ("a negative weight", "TrainingJob", {"spec.data.sources[0].weight": "-1"}, "spec.data.sources[0].weight: Invalid value: \"-1\": spec.data.sources[0].weight in body should match '^\\d+(\\.\\d+)?([eE][-+]?\\d\\d?)?$'"),
    ("no sources", "TrainingJob", {"spec.data.sources": []}, "spec.data.sources: Invalid value: 0: spec.data.sources in body should have at least 1 items"),
    ("a path that leaves the claim", "TrainingJob", {"spec.checkpoint.storage.path": "../other"}, "spec.checkpoint.storage.path: Invalid value: \"../other\": spec.checkpoint.storage.path in body should match '^[\\w=+,@-][\\w.=+,@-]*(/[\\w=+,@-][\\w.=+,@-]*)*$'"),
    ("a long name", "TrainingJob", {"metadata.name": "x" * 41}, "metadata.name: Too long: may not be more than 40 bytes"),
    ("a name with a dot", "TrainingJob", {"metadata.name": "a.b"}, "metadata.name: Invalid value: \"a.b\": metadata.name in body should match '^[a-z]([-a-z0-9]*[a-z0-9])?$'"),
    ("two sources of one name", "TrainingJob", {"spec.data.sources": [{"name": "a", "path": "/a"}, {"name": "a", "path": "/b"}]}, 'spec.data.sources[1]: Duplicate value: {"name":"a"}'),
    ("too many tags", "TrainingJob", {"spec.logging.wandb": {"project": "p", "tags": [f"t{n}" for n in range(33)]}}, "spec.logging.wandb.tags: Too many: 33: must have at most 32 items"),
    # exactly one of
    ("model twice", "TrainingJob", {"spec.modelFrom": {"gguf": {"path": "/m"}}}, 'spec: Invalid value: exactly one of model and modelFrom is needed'),
    ("no model", "TrainingJob", {"spec.model": DELETE}, 'spec: Invalid value: exactly one of model and modelFrom is needed'),
    ("two lengths", "TrainingJob", {"spec.training.epochs": 2}, 'spec.training: Invalid value: exactly one of totalSteps, totalTokens and epochs is needed'),
    ("two origins", "TrainingJob", {"spec.model": DELETE, "spec.modelFrom": {"gguf": {"path": "/m"}, "hub": {"id": "a/b"}}}, 'spec.modelFrom: Invalid value: exactly one of checkpoint, huggingFace, gguf and hub is needed'),
    ("claim and bucket", "TrainingJob", {"spec.checkpoint.storage.s3": {"bucket": "b"}}, 'spec.checkpoint.storage: Invalid value: exactly one of claimName and s3 is needed'),
    ("a bucket with a path", "TrainingJob", {"spec.checkpoint.storage": {"s3": {"bucket": "b"}, "path": "runs"}}, 'spec.checkpoint.storage.path: Invalid value: path needs claimName: a bucket has s3.prefix'),
    ("a bucket without a name", "TrainingJob", {"spec.checkpoint.storage": {"s3": {"prefix": "runs"}}}, 'spec.checkpoint.storage.s3.bucket: Required value'),
    ("an endpoint without a scheme", "TrainingJob", {"spec.checkpoint.storage": {"s3": {"bucket": "b", "endpoint": "minio:9000"}}}, "spec.checkpoint.storage.s3.endpoint: Invalid value: \"minio:9000\": spec.checkpoint.storage.s3.endpoint in body should match '^https?://[^\\s]+$'"),
    ("an import from a claim and a bucket", "Checkpoint", {"spec.source": {"import": {"storage": {"claimName": "c", "s3": {"bucket": "b"}}, "folder": "step-00000001.00000000"}}}, 'spec.source.import.storage: Invalid value: exactly one of claimName and s3 is needed'),
    ("a volume without a source", "TrainingJob", {"spec.workers.volumes": [{"name": "data"}]}, 'spec.workers.volumes[0]: Invalid value: exactly one of configMap, secret, persistentVolumeClaim, emptyDir and hostPath is needed'),
    ("validation twice", "TrainingJob", {"spec.data.validation": {"fraction": "0.1", "source": {"name": "v", "path": "/v"}}}, 'spec.data.validation: Invalid value: exactly one of source and fraction is needed'),
    # arithmetic
    ("ranks do not fit the mesh", "TrainingJob", {"spec.parallelism.tensor": 3, "spec.model.numHeads": 6, "spec.model.numKvHeads": 3, "spec.model.headDim": 16, "spec.model.intermediateSize": 96, "spec.model.vocabSize": 96}, 'spec.parallelism: Invalid value: replicas 2 x ranksPerPod 2 = 4 ranks do not divide by tensor 3 x pipeline 1 x context 1 = 3'),
    ("fewer ranks than the mesh", "TrainingJob", {"spec.parallelism": {"tensor": 4, "pipeline": 2}, "spec.model.numKvHeads": 4}, 'spec.parallelism: Invalid value: replicas 2 x ranksPerPod 2 = 4 ranks do not divide by tensor 4 x pipeline 2 x context 1 = 8'),
    ("ranks from gpus", "TrainingJob", {"spec.workers": {"replicas": 1, "gpusPerPod": 8}, "spec.parallelism.context": 3, "spec.training.sequenceLength": 66}, 'spec.parallelism: Invalid value: replicas 1 x ranksPerPod 8 = 8 ranks do not divide by tensor 1 x pipeline 1 x context 3 = 3'),
    ("key and value heads do not divide", "TrainingJob", {"spec.parallelism.tensor": 4}, 'spec.model: Invalid value: numKvHeads 2 is not a multiple of tensor 4'),
    ("tokens do not divide", "TrainingJob", {"spec.parallelism": {"tensor": 4, "sequenceParallel": True}, "spec.model.numKvHeads": 4, "spec.training.microBatchSize": 1, "spec.training.sequenceLength": 62}, 'spec.parallelism.sequenceParallel: Invalid value: sequenceParallel: microBatchSize 1 x sequenceLength 62 is not a multiple of context 1 x tensor 4'),
    ("batch does not divide", "TrainingJob", {"spec.training.globalBatchSize": 10, "spec.training.microBatchSize": 2}, 'spec.training: Invalid value: globalBatchSize 10 is not a multiple of microBatchSize 2 x data-parallel size 4 = 8'),
    ("batch with tensor parallel", "TrainingJob", {"spec.parallelism.tensor": 2, "spec.training.globalBatchSize": 7}, 'spec.training: Invalid value: globalBatchSize 7 is not a multiple of microBatchSize 1 x data-parallel size 2 = 2'),
    ("replicate does not divide", "TrainingJob", {"spec.parallelism.replicate": 3}, 'spec.parallelism: Invalid value: replicate 3 does not divide data-parallel size 4'),
    ("expert does not divide", "TrainingJob", {"spec.model.architecture": "mixtral", "spec.model.numExperts": 9, "spec.model.numExpertsPerToken": 2, "spec.parallelism.expert": 3}, 'spec.parallelism: Invalid value: expert 3 does not divide data-parallel size 4 / replicate 1 x tensor 1 = 4'),
    ("experts of a dense model", "TrainingJob", {"spec.parallelism.expert": 2}, 'spec.parallelism.expert: Invalid value: expert 2 needs a model with experts, got architecture llama'),
    ("three ranks, any data parallel", "TrainingJob", {"spec.workers": {"replicas": 3}, "spec.training.globalBatchSize": 9, "spec.training.deterministic": "AnyDataParallel"}, 'spec.training: Invalid value: deterministic AnyDataParallel needs a data-parallel size that is a power of two, got 3'),
    ("sequence parallel alone", "TrainingJob", {"spec.parallelism.sequenceParallel": True}, 'spec.parallelism.sequenceParallel: Invalid value: sequenceParallel needs tensor above 1'),
    ("context does not divide", "TrainingJob", {"spec.parallelism.context": 4, "spec.training.sequenceLength": 66}, 'spec.training.sequenceLength: Invalid value: sequenceLength 66 is not a multiple of context 4'),
    ("heads for ulysses", "TrainingJob", {"spec.parallelism": {"context": 4, "contextMethod": "Ulysses"}, "spec.model.numHeads": 6, "spec.model.numKvHeads": 6, "spec.model.headDim": 16}, 'spec.model: Invalid value: numHeads 6 is not a multiple of tensor 1 x context 4 with contextMethod Ulysses'),
    ("heads do not divide", "TrainingJob", {"spec.parallelism.tensor": 2, "spec.model.numHeads": 3, "spec.model.numKvHeads": 1, "spec.model.headDim": 16}, 'spec.model: Invalid value: numHeads 3 is not a multiple of tensor 2'),
    ("a stage without a layer", "TrainingJob", {"spec.parallelism.pipeline": 4}, 'spec.model.numLayers: Invalid value: numLayers 2 are fewer than pipeline 4 x stagesPerRank 1'),
    ("an interleaved stage without a layer", "TrainingJob", {"spec.parallelism": {"pipeline": 2, "pipelineSchedule": "Interleaved", "stagesPerRank": 2}}, 'spec.model.numLayers: Invalid value: numLayers 2 are fewer than pipeline 2 x stagesPerRank 2'),
    ("stages without a schedule for them", "TrainingJob", {"spec.parallelism": {"pipeline": 2, "stagesPerRank": 2}, "spec.model.numLayers": 4}, 'spec.parallelism.stagesPerRank: Invalid value: stagesPerRank 2: above 1 with pipelineSchedule Interleaved, 1 with GPipe, OneFOneB or without a pipeline'),
    ("interleaved without stages", "TrainingJob", {"spec.parallelism": {"pipeline": 2, "pipelineSchedule": "Interleaved"}}, 'spec.parallelism.stagesPerRank: Invalid value: stagesPerRank 1: above 1 with pipelineSchedule Interleaved, 1 with GPipe, OneFOneB or without a pipeline'),
    ("an unknown schedule", "TrainingJob", {"spec.parallelism.pipelineSchedule": "1F1B"}, 'spec.parallelism.pipelineSchedule: Unsupported value: "1F1B": supported values: "GPipe", "OneFOneB", "Interleaved", "ZeroBubble"'),
    ("an unknown way to exchange keys", "TrainingJob", {"spec.parallelism.contextMethod": "ring"}, 'spec.parallelism.contextMethod: Unsupported value: "ring": supported values: "AllGather", "Ring", "Ulysses"'),
    ("a budget without selective", "TrainingJob", {"spec.memory.activationBudgetGiB": "8"}, 'spec.memory.activationBudgetGiB: Invalid value: activationBudgetGiB needs activationCheckpointing selective, got none'),
    ("a checksum every 0 steps", "TrainingJob", {"spec.guards.checksumEverySteps": 0}, 'spec.guards.checksumEverySteps: Invalid value: 0: spec.guards.checksumEverySteps in body should be greater than or equal to 1'),
    ("path and url", "TrainingJob", {"spec.data.sources[0].url": "s3://bucket/corpus"}, 'spec.data.sources[0]: Invalid value: exactly one of path and url is needed'),
    ("a source of nothing", "TrainingJob", {"spec.data.sources[0].path": DELETE}, 'spec.data.sources[0]: Invalid value: exactly one of path and url is needed'),
    ("a url without a scheme", "TrainingJob", {"spec.data.sources": [{"name": "a", "url": "bucket/corpus"}]}, "spec.data.sources[0].url: Invalid value: \"bucket/corpus\": spec.data.sources[0].url in body should match '^[a-z][a-z0-9+.-]*://.+$'"),
    ("a sequence too long", "TrainingJob", {"spec.training.sequenceLength": 8192}, 'spec.training.sequenceLength: Invalid value: sequenceLength 8192 is above maxPositionEmbeddings 4096'),
    ("warm-up too long", "TrainingJob", {"spec.optimization.warmupSteps": 11}, 'spec.optimization.warmupSteps: Invalid value: warmupSteps 11 is above totalSteps 10'),
    ("more workers than elastic allows", "TrainingJob", {"spec.run.elastic": {"minWorkers": 3, "maxWorkers": 4}}, 'spec.workers.replicas: Invalid value: replicas 2 does not lie between run.elastic.minWorkers 3 and maxWorkers 4'),
    ("elastic upside down", "TrainingJob", {"spec.run.elastic": {"minWorkers": 2, "maxWorkers": 1}, "spec.workers.replicas": 2}, 'spec.workers.replicas: Invalid value: replicas 2 does not lie between run.elastic.minWorkers 2 and maxWorkers 1'),
    ("a topology key that no label has", "TrainingJob", {"spec.scheduling.topology": [{"key": "my rack"}]}, "spec.scheduling.topology[0].key: Invalid value: \"my rack\": spec.scheduling.topology[0].key in body should match '^([-a-z0-9.]+/)?[A-Za-z0-9]([-\\w.]*[A-Za-z0-9])?$'"),
    ("a topology key with two slashes", "InferenceDeployment", {"spec.pools[0].scheduling": {"topology": [{"key": "a/b/c"}]}}, "spec.pools[0].scheduling.topology[0].key: Invalid value: \"a/b/c\": spec.pools[0].scheduling.topology[0].key in body should match '^([-a-z0-9.]+/)?[A-Za-z0-9]([-\\w.]*[A-Za-z0-9])?$'"),
    ("a mode in small letters", "TrainingJob", {"spec.scheduling.topology": [{"key": "rack", "mode": "required"}]}, 'spec.scheduling.topology[0].mode: Unsupported value: "required": supported values: "Preferred", "Required"'),
    ("four levels", "TrainingJob", {"spec.scheduling.topology": [{"key": "a"}, {"key": "b"}, {"key": "c"}, {"key": "d"}]}, "spec.scheduling.topology: Too many: 4: must have at most 3 items"),
    ("no time for a gang", "TrainingJob", {"spec.scheduling.gangTimeoutSeconds": 0}, "spec.scheduling.gangTimeoutSeconds: Invalid value: 0: spec.scheduling.gangTimeoutSeconds in body should be greater than or equal to 1"),
    ("kueue without a queue", "TrainingJob", {"spec.scheduling.backend": "kueue"}, "spec.scheduling.queueName: Invalid value: queueName is needed with backend kueue, and unknown to stoker, got backend kueue"),
    ("kueue with an empty queue", "TrainingJob", {"spec.scheduling": {"backend": "kueue", "queueName": ""}}, "spec.scheduling.queueName: Invalid value: \"\": spec.scheduling.queueName in body should match '^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$'"),
    ("a queue of our own", "TrainingJob", {"spec.scheduling.queueName": "team"}, "spec.scheduling.queueName: Invalid value: queueName is needed with backend kueue, and unknown to stoker, got backend stoker"),
    ("a pool for kueue without a queue", "InferenceDeployment", {"spec.pools[0].scheduling": {"backend": "kueue"}}, "spec.pools[0].scheduling.queueName: Invalid value: queueName is needed with backend kueue, and unknown to stoker, got backend kueue"),
    ("a pool with a queue of our own", "InferenceDeployment", {"spec.pools[0].scheduling": {"queueName": "team"}}, "spec.pools[0].scheduling.queueName: Invalid value: queueName is needed with backend kueue, and unknown to stoker, got backend stoker"),
    ("a pool with an unknown backend", "InferenceDeployment", {"spec.pools[0].scheduling": {"backend": "slurm"}}, 'spec.pools[0].scheduling.backend: Unsupported value: "slurm": supported values: "auto", "stoker", "kueue", "volcano"'),
    ("elastic from nothing", "TrainingJob", {"spec.run.elastic": {"minWorkers": 0, "maxWorkers": 2}}, "spec.run.elastic.minWorkers: Invalid value: 0: spec.run.elastic.minWorkers in body should be greater than or equal to 1"),
    ("kv heads do not divide", "TrainingJob", {"spec.model.numKvHeads": 3}, 'spec.model.numKvHeads: Invalid value: numHeads 4 is not a multiple of numKvHeads 3'),
    ("hidden size without head size", "TrainingJob", {"spec.model.hiddenSize": 66}, 'spec.model.hiddenSize: Invalid value: hiddenSize 66 is not a multiple of numHeads 4: give headDim'),
    ("an odd head", "TrainingJob", {"spec.model.headDim": 15}, 'spec.model.headDim: Invalid value: headDim 15 is odd: rotary positions turn pairs'),
    ("experts without a number", "TrainingJob", {"spec.model.architecture": "mixtral"}, 'spec.model.numExperts: Invalid value: mixtral and qwen3-moe, and only they, need numExperts and numExpertsPerToken'),
    ("the old name of experts", "TrainingJob", {"spec.model.architecture": "moe"}, 'spec.model.architecture: Unsupported value: "moe": supported values: "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3-moe"'),
    ("experts of another width", "TrainingJob", {"spec.model.architecture": "mixtral", "spec.model.numExperts": 8, "spec.model.numExpertsPerToken": 2, "spec.model.moeIntermediateSize": 8}, "spec.model.architecture: Invalid value: moeIntermediateSize, normTopkProb, decoderSparseStep and mlpOnlyLayers are for qwen3-moe"),
    ("a window of llama", "TrainingJob", {"spec.model.slidingWindow": 64}, "spec.model.slidingWindow: Invalid value: llama has no slidingWindow"),
    ("window layers without a window", "TrainingJob", {"spec.model.architecture": "qwen2", "spec.model.maxWindowLayers": 1}, "spec.model.maxWindowLayers: Invalid value: maxWindowLayers needs slidingWindow and qwen2 or qwen3"),
    ("biases of mistral", "TrainingJob", {"spec.model.architecture": "mistral", "spec.model.attentionBias": True}, "spec.model.attentionBias: Invalid value: attentionBias is for llama, qwen3 and qwen3-moe"),
    ("the end above the start", "TrainingJob", {"spec.optimization.minLearningRate": "1e-3"}, 'spec.optimization.minLearningRate: Invalid value: minLearningRate 1e-3 is above learningRate 3e-4'),
    ("no learning rate", "TrainingJob", {"spec.optimization.learningRate": "0.0"}, 'spec.optimization.learningRate: Invalid value: learningRate must be above 0'),
    ("an epsilon that is 0 in float32", "TrainingJob", {"spec.optimization.epsilon": "1e-46"}, 'spec.optimization.epsilon: Invalid value: epsilon 1e-46 must be at least 1e-30'),
    ("beta of one", "TrainingJob", {"spec.optimization.beta1": "1"}, "spec.optimization.beta1: Invalid value: \"1\": spec.optimization.beta1 in body should match '^0(\\.\\d+)?$'"),
    ("Off without quotes", "TrainingJob", {"spec.training.deterministic": False}, '[spec.training.deterministic: Invalid value: "boolean": spec.training.deterministic in body must be of type string: "boolean" (a text is needed: write "Off" with its quotes), spec.training.deterministic: Unsupported value: false: supported values: "Off", "SameLayout", "AnyDataParallel"]'),
    ("a tokenizer without a path", "TrainingJob", {"spec.data.tokenizer.kind": "path"}, 'spec.data.tokenizer.path: Invalid value: path is needed with kind path, and only there'),
    # pods
    ("our variable", "TrainingJob", {"spec.workers.env": [{"name": "MASTER_ADDR", "value": "me"}]}, "spec.workers.env[0].name: Forbidden: MASTER_ADDR is set by Stoker and cannot be given"),
    ("value twice", "TrainingJob", {"spec.workers.env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]}, 'spec.workers.env[0]: Invalid value: value and valueFrom cannot be given together'),
    ("our path", "TrainingJob", {"spec.workers.volumes": [{"name": "d", "emptyDir": {}}], "spec.workers.volumeMounts": [{"name": "d", "mountPath": "/var/stoker/checkpoints"}]}, "spec.workers.volumeMounts[0].mountPath: Forbidden: /var/stoker/checkpoints is reserved for Stoker: mount below another path"),
    ("our volume", "TrainingJob", {"spec.workers.volumes": [{"name": "stoker-config", "emptyDir": {}}]}, "spec.workers.volumes[0].name: Forbidden: names that start with stoker- are reserved for Stoker"),
    ("a mount without a volume", "TrainingJob", {"spec.workers.volumeMounts": [{"name": "data", "mountPath": "/data"}]}, 'spec.workers.volumeMounts: Invalid value: no volume is named data'),
    ("gpus as a resource", "TrainingJob", {"spec.workers.resources": {"limits": {"nvidia.com/gpu": 8}}}, 'spec.workers.resources: Invalid value: GPUs belong into gpusPerPod'),
    ("a quantity that is none", "TrainingJob", {"spec.workers.resources": {"requests": {"memory": "lots"}}}, "spec.workers.resources.requests.memory: Invalid value: \"lots\": spec.workers.resources.requests.memory in body should match '^\\d+(\\.\\d+)?(m|[kMGTPE]|[KMGTPE]i)?$'"),
    # Checkpoint
    ("no source", "Checkpoint", {"spec.source": {}}, 'spec.source: Invalid value: exactly one of jobRef, import and save is needed'),
    ("two sources", "Checkpoint", {"spec.source.import": _IMPORT}, 'spec.source: Invalid value: exactly one of jobRef, import and save is needed'),
    ("an import that deletes", "Checkpoint", {"spec.source": {"import": _IMPORT}, "spec.deletionPolicy": "Delete"}, "spec.deletionPolicy: Forbidden: imported data is never deleted: deletionPolicy must be Retain"),
    ("a folder that is a path", "Checkpoint", {"spec.source": {"import": {**_IMPORT, "folder": "a/b"}}}, "spec.source.import.folder: Invalid value: \"a/b\": spec.source.import.folder in body should match '^[\\w-][\\w.-]*$'"),
    ("unknown policy", "Checkpoint", {"spec.deletionPolicy": "Keep"}, 'spec.deletionPolicy: Unsupported value: "Keep": supported values: "Retain", "Delete"'),
    # InferenceDeployment
    ("no pool", "InferenceDeployment", {"spec.pools": []}, 'spec.pools: Invalid value: 0: spec.pools in body should have at least 1 items'),
    ("prefill alone", "InferenceDeployment", {"spec.pools": [{"name": "p", "role": "prefill"}]}, 'spec.pools: Invalid value: pools must be one colocated pool, or one prefill and one decode pool, got 0 colocated, 1 prefill, 0 decode'),
    ("two colocated", "InferenceDeployment", {"spec.pools": [{"name": "a"}, {"name": "b"}]}, 'spec.pools: Invalid value: pools must be one colocated pool, or one prefill and one decode pool, got 2 colocated, 0 prefill, 0 decode'),
    ("model by two ways", "InferenceDeployment", {"spec.model.uri": "pvc://a/b"}, 'spec.model: Invalid value: exactly one of checkpointRef, checkpointSelector and uri is needed'),
    ("a plain path", "InferenceDeployment", {"spec.model": {"uri": "/models/a"}}, "spec.model.uri: Invalid value: uri /models/a names no model; allowed: file:///PATH, pvc://CLAIM[/PATH], hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY[:TAG or @DIGEST]"),
    ("a relative path", "InferenceDeployment", {"spec.model": {"uri": "file://models/a"}}, "spec.model.uri: Invalid value: uri file://models/a names no model; allowed: file:///PATH, pvc://CLAIM[/PATH], hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY[:TAG or @DIGEST]"),
    ("a path of a home", "InferenceDeployment", {"spec.model": {"uri": "~/models/a"}}, "spec.model.uri: Invalid value: uri ~/models/a names no model; allowed: file:///PATH, pvc://CLAIM[/PATH], hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY[:TAG or @DIGEST]"),
    ("the root alone", "InferenceDeployment", {"spec.model": {"uri": "file:///"}}, "spec.model.uri: Invalid value: uri file:/// names no model; allowed: file:///PATH, pvc://CLAIM[/PATH], hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY[:TAG or @DIGEST]"),
    ("a scheme in capitals", "InferenceDeployment", {"spec.model": {"uri": "FILE:///models/a"}}, "spec.model.uri: Invalid value: uri FILE:///models/a names no model; allowed: file:///PATH, pvc://CLAIM[/PATH], hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY[:TAG or @DIGEST]"),
    ("a path with a space", "InferenceDeployment", {"spec.model": {"uri": "file:///models/a b"}}, "spec.model.uri: Invalid value: uri file:///models/a b names no model; allowed: file:///PATH, pvc://CLAIM[/PATH], hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY[:TAG or @DIGEST]"),
    ("a hub's model without its owner", "InferenceDeployment", {"spec.model": {"uri": "hf://name"}}, "spec.model.uri: Invalid value: uri hf://name names no model; allowed: file:///PATH, pvc://CLAIM[/PATH], hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY[:TAG or @DIGEST]"),
    ("a registry without a repository", "InferenceDeployment", {"spec.model": {"uri": "oci://registry.example.com"}}, "spec.model.uri: Invalid value: uri oci://registry.example.com names no model; allowed: file:///PATH, pvc://CLAIM[/PATH], hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY[:TAG or @DIGEST]"),
    ("a claim without a name", "InferenceDeployment", {"spec.model": {"uri": "pvc:///a"}}, "spec.model.uri: Invalid value: uri pvc:///a names no model; allowed: file:///PATH, pvc://CLAIM[/PATH], hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY[:TAG or @DIGEST]"),
    ("a bucket in capitals", "InferenceDeployment", {"spec.model": {"uri": "s3://Models/a"}}, "spec.model.uri: Invalid value: uri s3://Models/a names no model; allowed: file:///PATH, pvc://CLAIM[/PATH], hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY[:TAG or @DIGEST]"),
    ("a goal between tokens where none are made", "InferenceDeployment", {"spec.pools": [{"name": "p", "role": "prefill", "autoscaling": {"max": 4, "ttftMs": 500, "itlMs": 40}}, {"name": "d", "role": "decode"}]}, "spec.pools[0].autoscaling.itlMs: Forbidden: itlMs is a goal of decode pools"),
    ("a goal of first tokens where none are made", "InferenceDeployment", {"spec.pools": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode", "autoscaling": {"max": 4, "ttftMs": 500, "itlMs": 40}}]}, "spec.pools[1].autoscaling.ttftMs: Forbidden: ttftMs is a goal of prefill pools"),
    ("a secret without a source", "InferenceDeployment", {"spec.model": {"uri": "pvc://a/b", "uriSecretRef": {"name": "s"}}}, 'spec.model.uriSecretRef: Invalid value: uriSecretRef belongs to a uri hf://, s3:// or oci://'),
    ("metric of the newest", "InferenceDeployment", {"spec.model": {"checkpointSelector": {"jobRef": {"name": "j"}, "metric": "loss"}}}, 'spec.model.checkpointSelector.metric: Invalid value: metric belongs to policy best'),
    ("gpus do not fit", "InferenceDeployment", {"spec.pools[0].parallelism": {"tensor": 4}, "spec.pools[0].gpusPerPod": 2}, 'spec.pools[0].parallelism: Invalid value: podsPerReplica 1 x ranksPerPod 2 = 2 ranks, but tensor 4 x pipeline 1 x data 1 = 4'),
    ("experts over data ranks of several GPUs", "InferenceDeployment", {"spec.pools[0].parallelism": {"tensor": 2, "data": 4, "expert": 4}, "spec.pools[0].gpusPerPod": 8}, 'spec.pools[0].parallelism.expert: Invalid value: expert 4 does not divide tensor 2'),
    ("autoscaling outside", "InferenceDeployment", {"spec.pools[0].autoscaling": {"min": 2, "max": 4, "ttftMs": 100}}, 'spec.pools[0].replicas: Invalid value: replicas 1 does not lie between autoscaling.min 2 and autoscaling.max 4'),
    ("autoscaling without a goal", "InferenceDeployment", {"spec.pools[0].autoscaling": {"max": 4}}, 'spec.pools[0].autoscaling.mode: Invalid value: mode slo needs ttftMs, itlMs or both'),
    ("a goal beside another scaler", "InferenceDeployment", {"spec.pools[0].autoscaling": {"max": 4, "mode": "external", "ttftMs": 100}}, 'spec.pools[0].autoscaling.ttftMs: Forbidden: ttftMs has no effect with mode external'),
    ("a goal between tokens beside another scaler", "InferenceDeployment", {"spec.pools[0].autoscaling": {"max": 4, "mode": "external", "itlMs": 100}}, 'spec.pools[0].autoscaling.itlMs: Forbidden: itlMs has no effect with mode external'),
    ("a delay beside another scaler", "InferenceDeployment", {"spec.pools[0].autoscaling": {"max": 4, "mode": "external", "scaleDownAfterSeconds": 60}}, 'spec.pools[0].autoscaling.scaleDownAfterSeconds: Forbidden: scaleDownAfterSeconds has no effect with mode external'),
    ("a score above one", "InferenceDeployment", {"spec.rollout": {"type": "canary", "canary": {"steps": [{"percent": 50}], "evalGates": [{"name": "a", "prompts": {"name": "q", "key": "k"}, "minScore": "2"}]}}}, "spec.rollout.canary.evalGates[0].minScore: Invalid value: \"2\": spec.rollout.canary.evalGates[0].minScore in body should match '^(0(\\.\\d+)?|1(\\.0+)?)$'"),
    ("a drop above one", "InferenceDeployment", {"spec.rollout": {"type": "canary", "canary": {"steps": [{"percent": 50}], "evalGates": [{"name": "a", "prompts": {"name": "q", "key": "k"}, "minScore": "0.9", "maxDrop": "1.5"}]}}}, "spec.rollout.canary.evalGates[0].maxDrop: Invalid value: \"1.5\": spec.rollout.canary.evalGates[0].maxDrop in body should match '^(0(\\.\\d+)?|1(\\.0+)?)$'"),
    ("a goal of a constant number", "InferenceDeployment", {"spec.pools[0].autoscaling": {"max": 4, "mode": "fixed", "ttftMs": 500}}, 'spec.pools[0].autoscaling.ttftMs: Forbidden: ttftMs has no effect with mode fixed'),
    ("a delay of a constant number", "InferenceDeployment", {"spec.pools[0].autoscaling": {"max": 4, "mode": "fixed", "scaleDownAfterSeconds": 60}}, 'spec.pools[0].autoscaling.scaleDownAfterSeconds: Forbidden: scaleDownAfterSeconds has no effect with mode fixed'),
    ("a goal where thresholds decide", "InferenceDeployment", {"spec.pools[0].autoscaling": {"max": 4, "mode": "load", "ttftMs": 500}}, 'spec.pools[0].autoscaling.ttftMs: Forbidden: ttftMs has no effect with mode load'),
    ("a goal between tokens where thresholds decide", "InferenceDeployment", {"spec.pools[0].autoscaling": {"max": 4, "mode": "load", "itlMs": 40}}, 'spec.pools[0].autoscaling.itlMs: Forbidden: itlMs has no effect with mode load'),
    ("a class that ages after its end", "InferenceDeployment", {"spec.router": {"classes": [{"name": "batch", "maxQueueSeconds": 60, "agingSeconds": 61}]}}, 'spec.router.classes[0].agingSeconds: Invalid value: agingSeconds 61 is above maxQueueSeconds 60'),
    ("a tier of two classes", "InferenceDeployment", {"spec.router": {"classes": [{"name": "a", "serviceTiers": ["flex"]}, {"name": "flex"}]}}, 'spec.router.classes: Invalid value: a value of serviceTiers belongs to one class, and is no name of one'),
    ("another model of an own name", "InferenceDeployment", {"spec.model.names": ["a"], "spec.router": {"models": [{"name": "a", "deploymentRef": {"name": "b"}}]}}, 'spec.router.models: Invalid value: a name of router.models is one of model.names'),
    ("a fallback to itself", "InferenceDeployment", {"spec.router": {"fallback": {"deploymentRef": {"name": "x"}}}}, "spec.router: Invalid value: fallback and models must name other deployments"),
    ("another model of itself", "InferenceDeployment", {"spec.router": {"models": [{"name": "b", "deploymentRef": {"name": "b"}}, {"name": "c", "deploymentRef": {"name": "x"}}]}}, "spec.router: Invalid value: fallback and models must name other deployments"),
    ("a goal of no time", "InferenceDeployment", {"spec.router": {"classes": [{"name": "a", "ttftMs": 0}]}}, "spec.router.classes[0].ttftMs: Invalid value: 0: spec.router.classes[0].ttftMs in body should be greater than or equal to 1"),
    ("a pool at zero that no request wakes", "InferenceDeployment", {"spec.pools[0].autoscaling": {"min": 0, "max": 4, "ttftMs": 100}}, "spec.router.holdSeconds: Invalid value: autoscaling.min 0 needs router.holdSeconds above 0: requests that routers hold wake the pool"),
    ("more copies of a block than claims", "InferenceDeployment", {"spec.engine": {"cache": {"hostMemoryBytes": 1000, "store": {"claimNames": ["blocks"], "replicas": 2, "bytes": 1000}}}}, "spec.engine.cache.store.replicas: Invalid value: replicas 2 is above the number of claimNames, 1"),
    ("a store that forgets at once", "InferenceDeployment", {"spec.engine": {"cache": {"hostMemoryBytes": 1000, "store": {"claimNames": ["blocks"], "bytes": 1000, "ttlSeconds": 1}}}}, "spec.engine.cache.store.ttlSeconds: Invalid value: 1: spec.engine.cache.store.ttlSeconds in body should be greater than or equal to 60"),
    ("a disk tier without a host tier", "InferenceDeployment", {"spec.engine": {"cache": {"disk": {"bytes": 1000}}}}, "spec.engine.cache.hostMemoryBytes: Invalid value: disk needs hostMemoryBytes, which must be at least 1"),
    ("a store without a host tier", "InferenceDeployment", {"spec.engine": {"cache": {"store": {"claimNames": ["blocks"], "bytes": 1000}}}}, "spec.engine.cache.hostMemoryBytes: Invalid value: store needs hostMemoryBytes, which must be at least 1"),
    ("a landing zone that none writes to", "InferenceDeployment", {"spec.engine": {"transfer": {"zoneBlocks": 8}}}, "spec.engine.transfer: Forbidden: transfer has no effect in a colocated pool"),
    ("no landing zone", "InferenceDeployment", {"spec.pools": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}], "spec.engine": {"transfer": {"zoneBlocks": 0}}}, "spec.engine.transfer.zoneBlocks: Invalid value: 0: spec.engine.transfer.zoneBlocks in body should be greater than or equal to 1"),
    ("a link that no engine has", "InferenceDeployment", {"spec.engine": {"transfer": {"require": "infiniband"}}}, 'spec.engine.transfer.require: Unsupported value: "infiniband": supported values: "any", "nvlink", "rdma"'),
    ("events of no cache", "InferenceDeployment", {"spec.engine": {"cache": {"prefixCache": False}, "cacheEvents": {"port": 5557}}}, "spec.engine.cacheEvents: Invalid value: cacheEvents needs cache.prefixCache true"),
    ("events at the engine's port", "InferenceDeployment", {"spec.engine": {"cacheEvents": {"port": 8000}}}, "spec.engine.cacheEvents: Invalid value: port and replayPort, each with data - 1 ports behind it, must be apart, at most 65535 and none of the engine's: 8000; with roles 8101 to 8100 + data x (1 + 2 x tensor x pipeline); with several pods 29500"),
    ("no room to roll", "InferenceDeployment", {"spec.pools[0].maxSurge": 0}, 'spec.pools[0].maxSurge: Invalid value: maxSurge and maxUnavailable cannot both be 0: no replica could ever be replaced'),
    ("no part to roll", "InferenceDeployment", {"spec.pools[0].maxSurge": "0%", "spec.pools[0].maxUnavailable": "0%"}, 'spec.pools[0].maxSurge: Invalid value: maxSurge and maxUnavailable cannot both be 0: no replica could ever be replaced'),
    ("a surge that is no part", "InferenceDeployment", {"spec.pools[0].maxSurge": "half"}, "spec.pools[0].maxSurge: Invalid value: \"half\": spec.pools[0].maxSurge in body should match '^(100|[1-9]?[0-9])%$'"),
    ("canary without type", "InferenceDeployment", {"spec.rollout": {"canary": _CANARY["canary"]}}, 'spec.rollout.canary: Invalid value: canary is needed with type canary, and only there'),
    ("a step twice", "InferenceDeployment", {"spec.rollout": {"type": "canary", "canary": {"steps": [{"percent": 10}, {"percent": 10}]}}}, 'spec.rollout.canary.steps: Invalid value: percent must rise, got [10, 10]'),
    ("steps that fall", "InferenceDeployment", {"spec.rollout": {"type": "canary", "canary": {"steps": [{"percent": 5}, {"percent": 50}, {"percent": 20}]}}}, 'spec.rollout.canary.steps: Invalid value: percent must rise, got [5, 50, 20]'),
    ("a ratio of nothing", "InferenceDeployment", {"spec.rollout": {"type": "canary", "canary": {"steps": [{"percent": 10}], "metricGates": [{"metric": "ttftP95Ms", "maxRatio": "0"}]}}}, 'spec.rollout.canary.metricGates[0].maxRatio: Invalid value: "0": must be above 0'),
    ("more errors than answers", "InferenceDeployment", {"spec.rollout": {"type": "canary", "canary": {"steps": [{"percent": 10}], "metricGates": [{"metric": "errorRate", "max": "2"}]}}}, 'spec.rollout.canary.metricGates[0].max: Invalid value: got 2, allowed: above 0, of errorRate 0 to 1'),
    ("first tokens in no time", "InferenceDeployment", {"spec.rollout": {"type": "canary", "canary": {"steps": [{"percent": 10}], "metricGates": [{"metric": "ttftP95Ms", "max": "0.0"}]}}}, 'spec.rollout.canary.metricGates[0].max: Invalid value: got 0.0, allowed: above 0, of errorRate 0 to 1'),
    ("a promotion without a canary", "InferenceDeployment", {"spec.rollout": {"promote": "r1"}}, 'spec.rollout: Forbidden: promote and abort need type canary'),
    ("an abort without a canary", "InferenceDeployment", {"spec.rollout": {"type": "rolling", "abort": "r1"}}, 'spec.rollout: Forbidden: promote and abort need type canary'),
    ("a gate without a limit", "InferenceDeployment", {"spec.rollout": {"type": "canary", "canary": {"steps": [{"percent": 10}], "metricGates": [{"metric": "errorRate"}]}}}, 'spec.rollout.canary.metricGates[0]: Invalid value: a metric gate needs max or maxRatio'),
    # EnginePool
    ("shares do not add up", "EnginePool", {"spec.revisions[0].share": 90}, 'spec.revisions: Invalid value: the shares of all revisions must add up to 100, got 90'),
    ("fewer than no replicas", "EnginePool", {"spec.replicas": -1}, "spec.replicas: Invalid value: -1: spec.replicas in body should be greater than or equal to 0"),
]  # fmt: skip

TOO_LARGE: list[tuple[str, str, dict[str, Any], str]] = [
    ("a micro-batch whose product overflows", "TrainingJob", {"spec.training.microBatchSize": 2**62}, "spec.training.microBatchSize: Invalid value: 4611686018427387904: spec.training.microBatchSize in body should be less than or equal to 2147483647"),
    ("a pipeline whose product overflows", "TrainingJob", {"spec.parallelism": {"pipeline": 2**62, "stagesPerRank": 100, "pipelineSchedule": "Interleaved"}}, "spec.parallelism.pipeline: Invalid value: 4611686018427387904: spec.parallelism.pipeline in body should be less than or equal to 65536"),
]  # fmt: skip
"""As `BAD`, for the embedded cluster alone: an API server evaluates its rules over such numbers, too, and adds that they
overflow."""


def changed(manifest: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy with each path set; missing objects on the way are made."""
    found = copy.deepcopy(manifest)
    for path, value in changes.items():
        node: Any = found
        *way, last = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", path)]
        for part in way:
            node = node[part] if isinstance(part, int) else node.setdefault(part, {})
        if value is DELETE:
            del node[last]
        else:
            node[last] = value
    return found
