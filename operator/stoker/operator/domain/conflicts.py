"""Values of a TrainingJob that have no effect or surely fail beside each other.

The CRD has no room for these rules. They hold for a spec as stored, camelCase, with or without defaults. Pure; called
by `unsupported`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.operator.domain.job_plan import gpu_of_spec
from stoker.pod.plan.layout_rules import problems_of_eight_bits, problems_of_sums

Section = Mapping[str, Any]

FP32_SMALLEST, FP32_LARGEST = 1.2e-38, 3.4e38
"""Of the numbers that a device computes with."""
_RATES = ("learningRate", "minLearningRate", "epsilon", "weightDecay", "gradientClipping")


def conflicts(spec: Section) -> list[str]:
    """Return one line per field, with its value and what it needs."""
    return [
        *_of_layout(spec),
        *_of_heads(spec),
        *_of_experts(spec),
        *_of_determinism(spec),
        *_of_precision(spec),
        *_of_length(spec),
        *_of_schedule(spec),
        *_of_numbers(spec),
        *_of_data(spec),
    ]


def _section(spec: Section, name: str) -> Section:
    found: Section = spec.get(name) or {}
    return found


def _of_layout(spec: Section) -> list[str]:
    parallelism = _section(spec, "parallelism")
    return [
        f"spec.parallelism.{field} {value} needs {axis} above 1"
        for field, axis, default in (
            ("pipelineSchedule", "pipeline", "OneFOneB"),
            ("contextMethod", "context", "AllGather"),
        )
        if (value := parallelism.get(field, default)) != default and parallelism.get(axis, 1) == 1
    ]


def _of_heads(spec: Section) -> list[str]:
    """Ranks of `context` share the heads of a tensor rank, where they exchange them."""
    parallelism, model = _section(spec, "parallelism"), _section(spec, "model")
    ranks, tensor = parallelism.get("context", 1), parallelism.get("tensor", 1)
    heads = model.get("numKvHeads") or model.get("numHeads")
    if parallelism.get("contextMethod") != "Ulysses" or not heads:
        return []
    held = heads // tensor
    if held % ranks == 0 or (held and ranks % held == 0):
        return []
    cut = f" / tensor {tensor} = {held}" if tensor > 1 else ""
    return [
        f"spec.parallelism.contextMethod Ulysses needs numKvHeads {heads}{cut} to be a multiple or a divisor of "
        f"context {ranks}; allowed: AllGather, Ring"
    ]


def _of_experts(spec: Section) -> list[str]:
    parallelism, model = _section(spec, "parallelism"), _section(spec, "model")
    tensor, context, expert = (parallelism.get(axis, 1) for axis in ("tensor", "context", "expert"))
    found = []
    width = model.get("moeIntermediateSize")
    if width and expert == 1 and width % tensor:
        found.append(f"spec.model.moeIntermediateSize {width} is not a multiple of tensor {tensor}; or set expert")
    layers = model.get("numLayers", 0)
    beyond = [layer for layer in model.get("mlpOnlyLayers") or () if layer >= layers]
    if beyond:
        found.append(f"spec.model.mlpOnlyLayers {beyond[0]} is none of the layers 0 to {layers - 1}")
    training = _section(spec, "training")
    tokens = training.get("microBatchSize", 1) * training.get("sequenceLength", 2048)
    if expert > 1 and not parallelism.get("sequenceParallel") and tokens % (context * tensor):
        found.append(
            f"spec.parallelism.expert {expert} needs microBatchSize x sequenceLength = {tokens} tokens to be a "
            f"multiple of context {context} x tensor {tensor} = {context * tensor}"
        )
    return found


def _of_determinism(spec: Section) -> list[str]:
    """The order of sums that `AnyDataParallel` fixes leaves some layouts out."""
    parallelism, mode = _section(spec, "parallelism"), _section(spec, "training").get("deterministic", "Off")
    if mode != "AnyDataParallel":
        return []
    sizes = {axis: parallelism.get(axis, 1) for axis in ("tensor", "context", "expert")}
    return [f"spec.training.{line}" for line in problems_of_sums(**sizes)]


def _of_precision(spec: Section) -> list[str]:
    memory = _section(spec, "memory")
    precision, recipe = memory.get("precision", "bf16"), memory.get("fp8Recipe", "Tensorwise")
    if precision == "fp8":
        return _of_eight_bits(spec)
    if recipe != "Tensorwise":
        return [f"spec.memory.fp8Recipe {recipe} needs precision fp8, got {precision}"]
    return []


def _of_eight_bits(spec: Section) -> list[str]:
    model, tensor, gpu = _section(spec, "model"), _section(spec, "parallelism").get("tensor", 1), gpu_of_spec(spec)
    if gpu is not None and "fp8" not in gpu.flops:
        return [f"spec.memory.precision fp8: an {gpu.name} does not compute in it; allowed: {', '.join(gpu.flops)}"]
    if not model:
        return []  # the trainer checks what is behind modelFrom
    heads = model["numHeads"]
    head_size = model.get("headDim") or model["hiddenSize"] // heads
    has_dense = not model.get("numExperts") or model.get("mlpOnlyLayers") or model.get("decoderSparseStep", 1) > 1
    found = problems_of_eight_bits(
        hidden=model["hiddenSize"],
        queries=heads * head_size,
        keys=model.get("numKvHeads", heads) * head_size,
        feed_forward=model["intermediateSize"] if has_dense else None,
        tensor=tensor,
    )
    return [f"spec.memory.{line}" for line in found]


def _of_length(spec: Section) -> list[str]:
    """The steps of a number of tokens; those of epochs the trainer knows, and the CRD has a rule for `totalSteps`."""
    training, warmup = _section(spec, "training"), _section(spec, "optimization").get("warmupSteps", 0)
    tokens = training.get("totalTokens")
    if tokens is None:
        return []
    step_tokens = training.get("globalBatchSize", 8) * training.get("sequenceLength", 2048)
    steps = -(-tokens // step_tokens)
    if warmup <= steps:
        return []
    return [
        f"spec.optimization.warmupSteps {warmup} is above the {steps} steps of totalTokens {tokens} in batches of "
        f"{step_tokens} tokens"
    ]


def _of_schedule(spec: Section) -> list[str]:
    optimization = _section(spec, "optimization")
    floor, schedule = optimization.get("minLearningRate", "0"), optimization.get("schedule", "cosine")
    if schedule != "constant" or float(floor) == 0:
        return []
    return [
        f"spec.optimization.minLearningRate {floor} has no effect with schedule constant; "
        'allowed: "0", or schedule cosine or linear'
    ]


def _of_numbers(spec: Section) -> list[str]:
    """Decimals that are 0, 1 or infinite in the numbers of a device."""
    optimization, model = _section(spec, "optimization"), _section(spec, "model")
    rates = {f"spec.optimization.{name}": optimization.get(name, "0") for name in _RATES}
    rates |= {f"spec.model.{name}": model.get(name, "1") for name in ("ropeTheta", "initializerRange", "normEps")}
    found = [
        f"{field} {value} is above {FP32_LARGEST}, the largest number of fp32"
        for field, value in rates.items()
        if float(value) > FP32_LARGEST
    ]
    found += [
        f"spec.optimization.{name} {optimization[name]} is 1 in a floating-point number; it must be below"
        for name in ("beta1", "beta2")
        if float(optimization.get(name, "0")) >= 1
    ]
    positive = {
        "spec.optimization.learningRate": optimization.get("learningRate", "1"),
        "spec.model.ropeTheta": model.get("ropeTheta", "1"),
        "spec.model.initializerRange": model.get("initializerRange", "1"),  # weights of zeros never change
    }
    return found + [
        f"{field} {value} is 0 in fp32; it must be at least {FP32_SMALLEST}"
        for field, value in positive.items()
        if float(value) < FP32_SMALLEST
    ]


def _of_data(spec: Section) -> list[str]:
    data = _section(spec, "data")
    tokenizer, validation = _section(data, "tokenizer"), _section(data, "validation")
    sources = {f"spec.data.sources {source['name']}": source for source in data.get("sources") or ()}
    if validation.get("source"):
        sources["spec.data.validation.source"] = validation["source"]
    kind, size = tokenizer.get("kind", "auto"), tokenizer.get("vocabSize", 0)
    found = [
        f"{field}: weight {source['weight']} must be above 0"
        for field, source in sources.items()
        if float(source.get("weight", 1)) <= 0
    ]
    fraction = validation.get("fraction")
    if fraction is not None and float(fraction) <= 0:
        found.append(f"spec.data.validation.fraction {fraction} must be above 0; without validation leave it out")
    vocabulary = _section(spec, "model").get("vocabSize")
    if kind == "train" and vocabulary is not None and size > vocabulary:
        found.append(f"spec.data.tokenizer.vocabSize {size} is above the model's vocabSize {vocabulary}")
    found += [
        f"{field}: format tokens needs the tokenizer that made the tokens: "
        "data.tokenizer.kind path, or kind auto with modelFrom"
        for field, source in sources.items()
        if source.get("format") == "tokens" and (kind == "train" or (kind == "auto" and not spec.get("modelFrom")))
    ]
    return found
