"""Features that this version lacks: each is named with its place, its value and the allowed values."""

from typing import Any

import pytest

from stoker.operator.domain.unsupported import unsupported

_SIZES = {"vocabSize": 512, "hiddenSize": 64, "intermediateSize": 128, "numHeads": 4, "numKvHeads": 2, "headDim": 16}
_ZERO_BUBBLE = {"pipeline": 2, "pipelineSchedule": "ZeroBubble"}
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("TrainingJob", {}, []),
    ("TrainingJob", {"model": {"architecture": "qwen3"}, "memory": {"zeroStage": 1, "precision": "bf16"}}, []),
    ("TrainingJob", {"memory": {"zeroStage": 3, "precision": "fp16", "activationCheckpointing": "selective"}, "optimization": {"optimizer": "lamb"}}, []),
    ("TrainingJob", {"memory": {"precision": "fp8", "fp8Recipe": "Rowwise"}}, []),
    ("TrainingJob", {"memory": {"fp8Recipe": "Rowwise"}}, ["spec.memory.fp8Recipe Rowwise needs precision fp8, got bf16"]),
    ("TrainingJob", {"memory": {"precision": "fp8"}, "model": _SIZES}, []),
    ("TrainingJob", {"memory": {"precision": "fp8"}, "model": {**_SIZES, "numExperts": 8, "intermediateSize": 100}}, []),
    ("TrainingJob", {"memory": {"precision": "fp8"}, "model": {**_SIZES, "hiddenSize": 72}, "parallelism": {"tensor": 4}}, [
        "spec.memory.precision fp8 needs hiddenSize 72 to be a multiple of 16; allowed: bf16, fp16, fp32",
        "spec.memory.precision fp8 needs numKvHeads x headDim 32 / tensor 4 to be a multiple of 16; allowed: bf16, fp16, fp32",
    ]),
    ("TrainingJob", {"memory": {"precision": "fp8"}, "model": {**_SIZES, "numExperts": 8, "numLayers": 2, "mlpOnlyLayers": [0], "intermediateSize": 100}}, [
        "spec.memory.precision fp8 needs intermediateSize 100 to be a multiple of 16; allowed: bf16, fp16, fp32",
    ]),
    ("TrainingJob", {"memory": {"precision": "fp8"}, "model": {**_SIZES, "numExperts": 8, "decoderSparseStep": 2, "intermediateSize": 100}}, [
        "spec.memory.precision fp8 needs intermediateSize 100 to be a multiple of 16; allowed: bf16, fp16, fp32",
    ]),
    ("TrainingJob", {"memory": {"precision": "fp8"}, "workers": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}}}, ["spec.memory.precision fp8: an A100 does not compute in it; allowed: bf16, fp16, fp32"]),
    ("TrainingJob", {"parallelism": {"pipelineSchedule": "GPipe", "contextMethod": "Ring"}}, ["spec.parallelism.pipelineSchedule GPipe needs pipeline above 1", "spec.parallelism.contextMethod Ring needs context above 1"]),
    ("TrainingJob", {"training": {"deterministic": "AnyDataParallel"}, "parallelism": {"tensor": 2, "context": 4}}, []),
    ("TrainingJob", {"training": {"deterministic": "SameLayout"}, "parallelism": {"tensor": 3, "replicate": 2, "expert": 2}, "model": {"numExperts": 8}}, ["spec.parallelism.expert 2 needs microBatchSize x sequenceLength = 2048 tokens to be a multiple of context 1 x tensor 3 = 3"]),
    ("TrainingJob", {"training": {"deterministic": "AnyDataParallel"}, "parallelism": {"tensor": 3, "context": 2, "replicate": 2}}, [
        "spec.training.deterministic AnyDataParallel needs tensor to be a power of two, got 3; allowed: Off, SameLayout",
    ]),
    ("TrainingJob", {"training": {"deterministic": "AnyDataParallel"}, "parallelism": {"expert": 2, "replicate": 2}}, ["spec.training.deterministic AnyDataParallel needs expert 1, got 2: the rows of an expert come from several ranks into one sum; allowed: Off, SameLayout"]),
    ("TrainingJob", {"parallelism": {"context": 2, "contextMethod": "Ulysses"}, "model": {**_SIZES, "numKvHeads": 1}}, []),
    ("TrainingJob", {"parallelism": {"context": 2, "contextMethod": "Ulysses", "tensor": 2}, "model": {**_SIZES, "numHeads": 12, "numKvHeads": 6}}, ["spec.parallelism.contextMethod Ulysses needs numKvHeads 6 / tensor 2 = 3 to be a multiple or a divisor of context 2; allowed: AllGather, Ring"]),
    ("TrainingJob", {"parallelism": {"tensor": 4}, "model": {**_SIZES, "moeIntermediateSize": 30}}, ["spec.model.moeIntermediateSize 30 is not a multiple of tensor 4; or set expert"]),
    ("TrainingJob", {"model": {**_SIZES, "numLayers": 2, "mlpOnlyLayers": [0, 2]}}, ["spec.model.mlpOnlyLayers 2 is none of the layers 0 to 1"]),
    ("TrainingJob", {"data": {"validation": {"source": {"name": "v", "weight": "0", "format": "tokens"}}}, "model": _SIZES}, [
        "spec.data.validation.source: weight 0 must be above 0",
        "spec.data.validation.source: format tokens needs the tokenizer that made the tokens: data.tokenizer.kind path, or kind auto with modelFrom",
    ]),
    ("TrainingJob", {"optimization": {"learningRate": "1e-30", "beta2": "0.999999", "epsilon": "1e-8", "gradientClipping": "0"}}, []),
    ("TrainingJob", {"optimization": {"learningRate": "1e-60", "beta2": "0.99999999999999999999", "weightDecay": "1e39"}, "model": {**_SIZES, "ropeTheta": "0", "initializerRange": "0"}}, [
        "spec.optimization.weightDecay 1e39 is above 3.4e+38, the largest number of fp32",
        "spec.optimization.beta2 0.99999999999999999999 is 1 in a floating-point number; it must be below",
        "spec.optimization.learningRate 1e-60 is 0 in fp32; it must be at least 1.2e-38",
        "spec.model.ropeTheta 0 is 0 in fp32; it must be at least 1.2e-38",
        "spec.model.initializerRange 0 is 0 in fp32; it must be at least 1.2e-38",
    ]),
    ("TrainingJob", {"optimization": {"schedule": "constant", "minLearningRate": "0.0"}}, []),
    ("TrainingJob", {"optimization": {"schedule": "linear", "minLearningRate": "1e-5"}}, []),
    ("TrainingJob", {"optimization": {"schedule": "constant", "minLearningRate": "1e-5"}}, [
        'spec.optimization.minLearningRate 1e-5 has no effect with schedule constant; allowed: "0", or schedule cosine or linear',
    ]),
    ("TrainingJob", {"training": {"totalTokens": 100_000, "sequenceLength": 1024}, "optimization": {"warmupSteps": 13}}, []),
    ("TrainingJob", {"training": {"totalTokens": 100_000, "sequenceLength": 1024}, "optimization": {"warmupSteps": 14}}, [
        "spec.optimization.warmupSteps 14 is above the 13 steps of totalTokens 100000 in batches of 8192 tokens",
    ]),
    ("TrainingJob", {"data": {"sources": [{"name": "a", "url": "s3://bucket/x"}, {"name": "b", "url": "file:///data/x"}, {"name": "c", "url": "https://host:8080/x?y=1"}]}}, []),
    ("TrainingJob", {"data": {"sources": [{"name": "a", "url": "s3:///x"}, {"name": "b", "url": "https://host/a b"}]}}, [
        "spec.data.sources a: url s3:///x: no host or bucket follows //; a URL is like s3://bucket/corpus or https://host/file",
        "spec.data.sources b: url https://host/a b: it has a space; a URL is like s3://bucket/corpus or https://host/file",
    ]),
    ("TrainingJob", {"data": {"validation": {"source": {"name": "v", "url": "http:///v"}}}}, ["spec.data.validation.source.url http:///v: no host or bucket follows //; a URL is like s3://bucket/corpus or https://host/file"]),
    ("TrainingJob", {"checkpoint": {"storage": {"s3": {"bucket": "My Bucket", "endpoint": "http://minio:99999"}}}}, [
        "spec.checkpoint.storage.s3.bucket 'My Bucket': a name of a bucket begins with a letter or digit, and has only these and . _ -",
        "spec.checkpoint.storage.s3.endpoint http://minio:99999: Port out of range 0-65535; an endpoint is like https://minio.storage:9000",
    ]),
    ("TrainingJob", {"logging": {"mlflow": {"trackingUri": "http://mlflow:5000", "experiment": "e"}}}, []),
    ("TrainingJob", {"logging": {"mlflow": {"trackingUri": "file:///runs", "experiment": "e"}}}, []),
    ("TrainingJob", {"logging": {"mlflow": {"trackingUri": "ftp://runs", "experiment": "e"}}}, ["spec.logging.mlflow.trackingUri ftp://runs: no folder and no server; allowed: file:///FOLDER, http:// and https://"]),
    ("TrainingJob", {"data": {"sources": [{"name": "web", "weight": 2}, {"name": "code", "weight": "0.0"}]}}, ["spec.data.sources code: weight 0.0 must be above 0"]),
    ("TrainingJob", {"data": {"validation": {"fraction": "0"}}}, ["spec.data.validation.fraction 0 must be above 0; without validation leave it out"]),
    ("TrainingJob", {"data": {"tokenizer": {"kind": "train", "vocabSize": 1024}}, "model": _SIZES}, ["spec.data.tokenizer.vocabSize 1024 is above the model's vocabSize 512"]),
    ("TrainingJob", {"data": {"sources": [{"name": "web", "format": "tokens"}]}, "model": _SIZES}, ["spec.data.sources web: format tokens needs the tokenizer that made the tokens: data.tokenizer.kind path, or kind auto with modelFrom"]),
    ("TrainingJob", {"data": {"sources": [{"name": "web", "format": "tokens"}]}, "modelFrom": {"hub": {"id": "a/b"}}}, []),
    ("TrainingJob", {"data": {"sources": [{"name": "web", "format": "tokens"}], "tokenizer": {"kind": "path", "path": "/t"}}, "model": _SIZES}, []),
    ("TrainingJob", {"memory": {"cpuOffload": True}}, []),
    ("TrainingJob", {"memory": {"cpuOffload": True}, "optimization": {"optimizer": "lamb"}}, []),
    ("TrainingJob", {"memory": {"activationCheckpointing": "selective", "activationBudgetGiB": "4"}}, []),
    ("TrainingJob", {"memory": {"activationBudgetGiB": "4"}, "parallelism": {"pipeline": 2, "sequenceParallel": True}, "lora": {"rank": 4}}, []),
    ("TrainingJob", {"memory": {"activationBudgetGiB": "4"}, "parallelism": {"pipeline": 2, "pipelineSchedule": "ZeroBubble"}}, []),
    ("TrainingJob", {"memory": {"activationBudgetGiB": "4"}, "model": {**_SIZES, "numLayers": 2, "numExperts": 8, "numExpertsPerToken": 2, "moeIntermediateSize": 64}, "parallelism": {"expert": 2}, "workers": {"replicas": 2}}, []),
    ("TrainingJob", {"memory": {"activationBudgetGiB": "4"}, "model": {**_SIZES, "numLayers": 2, "numExperts": 8, "numExpertsPerToken": 2, "moeIntermediateSize": 64}, "parallelism": _ZERO_BUBBLE, "workers": {"replicas": 2}}, []),
    ("TrainingJob", {"memory": {"activationBudgetGiB": "4"}, "modelFrom": {"hub": {"id": "a/b"}}, "lora": {}, "parallelism": _ZERO_BUBBLE, "workers": {"replicas": 2}}, []),
    ("TrainingJob", {"memory": {"activationBudgetGiB": "4", "precision": "fp8"}, "modelFrom": {"hub": {"id": "a/b"}}, "parallelism": {"tensor": 2, "sequenceParallel": True}, "workers": {"replicas": 2}}, []),
    ("TrainingJob", {"memory": {"nvmeOffload": {"path": "/x"}}}, []),
    ("TrainingJob", {"memory": {"nvmeOffload": {"path": "/x"}, "cpuOffload": True}}, ["spec.memory.cpuOffload true is not supported yet with memory.nvmeOffload: both take the whole state; `stoker plan` shows its size; allowed: false"]),
    ("TrainingJob", {"memory": {"nvmeOffload": {"path": "/x"}}, "optimization": {"optimizer": "lamb"}}, []),
    ("TrainingJob", {"model": {"architecture": "mixtral", "slidingWindow": 64, "numExperts": 8}}, []),
    ("TrainingJob", {"modelFrom": {"hub": {"id": "a/b"}}}, []),
    (
        "TrainingJob",
        {"parallelism": {"tensor": 2, "pipeline": 2, "sequenceParallel": True}},
        [],
    ),
    ("TrainingJob", {"parallelism": {"pipeline": 2, "pipelineSchedule": "ZeroBubble", "stagesPerRank": 2}, "memory": {"zeroStage": 1}}, []),
    ("TrainingJob", {"parallelism": {"pipeline": 2}, "memory": {"zeroStage": 3, "activationCheckpointing": "selective"}}, []),
    ("TrainingJob", {"parallelism": {"pipeline": 2, "tensor": 2}, "model": {"numExperts": 8}}, []),
    ("TrainingJob", {"parallelism": {"context": 2}, "model": {"numExperts": 8}}, []),
    ("TrainingJob", {"parallelism": {"context": 2, "contextMethod": "Ring"}, "runtime": {"attention": "flash"}}, ["spec.runtime.attention flash is not supported yet with parallelism.context 2 and contextMethod Ring; allowed: auto, sdpa, stoker"]),
    ("TrainingJob", {"parallelism": {"context": 2, "contextMethod": "Ulysses"}, "runtime": {"attention": "flash"}}, []),
    ("TrainingJob", {"parallelism": {"expert": 2}, "model": {"numExperts": 8}}, []),
    ("TrainingJob", {"checkpoint": {"storage": {"s3": {"bucket": "b"}}}}, []),
    ("TrainingJob", {"run": {"elastic": {"minWorkers": 1, "maxWorkers": 2}}}, []),
    ("TrainingJob", {"scheduling": {"backend": "kueue", "queueName": "team"}}, []),
    ("TrainingJob", {"scheduling": {"backend": "auto", "gangTimeoutSeconds": 60}}, []),
    ("TrainingJob", {"scheduling": {"gangTimeoutSeconds": 90, "topology": [{"key": "zone"}]}}, []),
    ("Checkpoint", {"verification": "Full"}, []),
    ("Checkpoint", {"verification": "Manifest"}, []),
    ("TrainingJob", {"runtime": {"kernels": "fused"}}, []),
    ("TrainingJob", {"runtime": {"kernels": "fused", "attention": "flash"}}, []),
    ("TrainingJob", {"runtime": {"kernels": "fused", "attention": "cudnn"}}, []),
    ("TrainingJob", {"runtime": {"kernels": "reference", "attention": "flash"}}, ["spec.runtime.attention flash is not supported yet with runtime.kernels reference; allowed: auto, sdpa"]),
    ("TrainingJob", {"runtime": {"kernels": "fused", "attention": "flash"}, "training": {"deterministic": "SameLayout"}}, ["spec.runtime.attention flash is not supported yet with runtime.kernels fused and training.deterministic SameLayout; allowed: auto, stoker"]),
    ("InferenceDeployment", {"engine": {"kernels": "reference", "deterministic": True, "attention": "sdpa"}}, ["spec.engine.attention sdpa is not supported yet with engine.kernels reference and engine.deterministic true; allowed: auto, stoker"]),
    ("InferenceDeployment", {"engine": {"kernels": "fused", "attention": "stoker"}}, []),
    ("InferenceDeployment", {"engine": {"attention": "cudnn"}}, ["spec.engine.attention cudnn is not supported yet; allowed: auto, sdpa, stoker, flash"]),
    ("InferenceDeployment", {"engine": {"attention": "flash"}}, []),
    ("InferenceDeployment", {"engine": {"kernels": "fused", "attention": "flash"}}, []),
    ("InferenceDeployment", {"engine": {"kernels": "reference", "attention": "flash"}}, ["spec.engine.attention flash is not supported yet with engine.kernels reference; allowed: auto, sdpa"]),
    ("InferenceDeployment", {"engine": {"kernels": "fused", "attention": "flash", "deterministic": True}}, ["spec.engine.attention flash is not supported yet with engine.kernels fused and engine.deterministic true; allowed: auto, stoker"]),
    ("Checkpoint", {"source": {"import": {"storage": {"s3": {"bucket": "b"}}}}}, []),
    ("InferenceDeployment", {"model": {"uri": "hf://a/b"}}, []),
    ("InferenceDeployment", {"model": {"uri": "pvc://models/a"}}, []),
    ("InferenceDeployment", {"engine": {"api": {"fronts": 2}}}, []),
    ("InferenceDeployment", {"router": {"policy": "cacheAware"}}, []),
    (
        "InferenceDeployment",
        {"pools": [{"name": "a", "role": "prefill"}, {"name": "b", "role": "decode", "autoscaling": {"max": 3, "mode": "fixed"}}]},
        [],
    ),
    ("InferenceDeployment", {"pools": [{"name": "a", "role": "prefill"}, {"name": "b", "role": "decode"}], "engine": {"transfer": {"require": "any"}}}, []),
    (
        "InferenceDeployment",
        {
            "pools": [{"name": "a", "role": "prefill", "gpusPerPod": 1}, {"name": "b", "role": "decode", "gpusPerPod": 1}],
            "engine": {"device": "cuda", "transfer": {"require": "nvlink"}},
        },
        [],
    ),
    (
        "InferenceDeployment",
        {
            "pools": [{"name": "a", "role": "prefill", "gpusPerPod": 2, "parallelism": {"pipeline": 2}}, {"name": "b", "role": "decode", "parallelism": {"data": 2}}],
            "engine": {"cache": {"prefixCache": False}, "device": "cuda"},
        },
        [
            "spec.engine.cache.prefixCache false is not supported yet with prefill and decode pools; allowed: true",
        ],
    ),
    ("InferenceDeployment", {"pools": [{"name": "a", "role": "prefill", "ranksPerPod": 2, "parallelism": {"tensor": 2}}, {"name": "b", "role": "decode"}]}, []),
    ("InferenceDeployment", {"pools": [{"name": role, "role": role, "gpusPerPod": 2, "parallelism": {"tensor": 2, "expert": 2}} for role in ("prefill", "decode")]}, []),
    ("InferenceDeployment", {"pools": [{"name": "a", "role": "prefill", "gpusPerPod": 2, "parallelism": {"tensor": 2}}, {"name": "b", "role": "decode", "ranksPerPod": 1}], "engine": {"device": "cpu"}}, []),
    (
        "InferenceDeployment",
        {"pools": [{"name": "a", "role": "prefill", "gpusPerPod": 2, "parallelism": {"tensor": 2}}, {"name": "b", "role": "decode", "gpusPerPod": 1}]},
        [],
    ),
    (
        "InferenceDeployment",
        {"pools": [{"name": "a", "role": "prefill", "gpusPerPod": 2, "parallelism": {"pipeline": 2}}, {"name": "b", "role": "decode", "gpusPerPod": 1}]},
        [],
    ),
    (
        "InferenceDeployment",
        {"pools": [{"name": "a", "role": "prefill", "podsPerReplica": 2, "parallelism": {"tensor": 2}}, {"name": "b", "role": "decode"}]},
        [],
    ),
    ("InferenceDeployment", {"pools": [{"name": "a", "role": "prefill", "ranksPerPod": 4, "parallelism": {"data": 4}}, {"name": "b", "role": "decode", "podsPerReplica": 2, "parallelism": {"data": 2, "expert": 2}}]}, []),
    ("InferenceDeployment", {"pools": [{"name": "a", "role": "prefill", "gpusPerPod": 4, "parallelism": {"tensor": 2, "data": 2}}, {"name": "b", "role": "decode", "gpusPerPod": 2, "parallelism": {"tensor": 2}}]}, []),
    ("InferenceDeployment", {"pools": [{"name": "a", "autoscaling": {"max": 3, "mode": "external"}}]}, []),
    ("InferenceDeployment", {"pools": [{"name": "a", "autoscaling": {"max": 3, "mode": "fixed"}}]}, []),
    ("InferenceDeployment", {"pools": [{"name": "a", "autoscaling": {"max": 3, "mode": "slo", "ttftMs": 500}}]}, []),
    ("InferenceDeployment", {"pools": [{"name": "a", "autoscaling": {"max": 3, "mode": "load"}}]}, []),
    ("InferenceDeployment", {"pools": [{"name": "a", "podsPerReplica": 2, "parallelism": {"tensor": 2}}, {"name": "b", "parallelism": {"data": 2}}]}, []),
    ("InferenceDeployment", {"pools": [{"name": "a", "podsPerReplica": 2, "parallelism": {"data": 3}}]}, ["spec.pools[a].parallelism.data 3 is not supported yet with podsPerReplica 2; allowed: 1, its divisors and multiples"]),
    ("InferenceDeployment", {"pools": [{"name": "a", "podsPerReplica": 2, "parallelism": {"data": 4}}, {"name": "b", "podsPerReplica": 4, "parallelism": {"data": 2}}]}, []),
    ("InferenceDeployment", {"pools": [{"name": "a", "podsPerReplica": 2, "parallelism": {"data": 2}, "autoscaling": {"min": 1, "max": 2}}]}, []),
    ("InferenceDeployment", {"engine": {"cache": {"disk": {"bytes": 9}}}, "pools": [{"name": "a", "podsPerReplica": 2, "parallelism": {"data": 4}}]}, []),
    ("InferenceDeployment", {"engine": {"cache": {"disk": {"bytes": 9}}}, "pools": [{"name": "a", "podsPerReplica": 4, "parallelism": {"data": 2, "tensor": 2}}]}, []),
    ("EnginePool", {"revisions": [{"name": "r", "template": {"podsPerReplica": 2}}]}, []),
    ("InferenceDeployment", {"pools": [{"name": "a", "podsPerReplica": 2, "parallelism": {"pipeline": 2}}]}, []),
    ("InferenceDeployment", {"pools": [{"name": "a", "gpusPerPod": 4, "parallelism": {"tensor": 2, "pipeline": 2, "expert": 2}}]}, []),
    ("EnginePool", {"revisions": [{"name": "r", "template": {"podsPerReplica": 2, "role": "decode", "config": {"parallelism": {"data": 3}}}}]}, ["spec.revisions[r].template.config.parallelism.data 3 is not supported yet with podsPerReplica 2; allowed: 1, its divisors and multiples"]),
    ("EnginePool", {"revisions": [{"name": "r", "share": 70}, {"name": "s", "share": 30}]}, []),
    ("EnginePool", {"revisions": [{"name": "r", "share": 100}, {"name": "s", "share": 0}]}, []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "spec", "lines"), CASES, ids=[f"{kind} {number}" for number, (kind, _, _) in enumerate(CASES)]
)
def test_unsupported_names(kind: str, spec: dict[str, Any], lines: list[str]) -> None:
    assert unsupported(kind, spec) == lines
