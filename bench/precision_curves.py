"""Losses of a small model in bf16, fp8 and fp8 by rows over the same 300 steps, on a CPU (about two minutes).

    python -m bench.precision_curves

The model (4 layers, 128 wide) learns documents in which nine of ten tokens follow from the one before. Printed: means
of the losses over 50 steps, and their relative difference from bf16. The tolerance is 1 % from step 100 on. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from typing import Any

import numpy as np

from stoker.trainer.protocol.messages import StepEvent
from testing.trainer.layouts import MODEL
from testing.trainer.tiny_run import ChainBatches, RecordingChannel, alone, tiny_config, train

SMALL = replace(MODEL, hidden_size=128, intermediate_size=256, num_layers=4, head_dim=16, initializer_range=0.02)
RUNS: dict[str, dict[str, Any]] = {
    "bf16": {"memory__precision": "bf16"},
    "fp8 Tensorwise": {"memory__precision": "fp8"},
    "fp8 Rowwise": {"memory__precision": "fp8", "memory__fp8_recipe": "Rowwise"},
}
WINDOW, TOLERANCE, SETTLED = 50, 0.01, 100


def losses(steps: int, changes: dict[str, Any]) -> list[float]:
    """Train one run from the same weights on the same batches."""
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(
            folder,
            training__total_steps=steps,
            training__deterministic="Off",
            training__micro_batch_size=8,
            training__sequence_length=32,
            model={},
            optimization__learning_rate=0.003,
            **changes,
        )
        context = alone()
        train(config, context, replace(SMALL, max_position_embeddings=256), ChainBatches(config, SMALL.vocab_size))
    assert isinstance(context.channel, RecordingChannel)
    return [event.loss for event in context.channel.all(StepEvent)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    means = {
        name: np.array(losses(steps, changes)).reshape(-1, WINDOW).mean(1).round(4) for name, changes in RUNS.items()
    }
    gaps = {name: (values / means["bf16"] - 1).round(4) for name, values in means.items()}
    for name, values in means.items():
        print(f"{name:15} {values}  {gaps[name]}")
    worst = max(float(np.abs(values[SETTLED // WINDOW :]).max()) for values in gaps.values())
    print(
        json.dumps({"worst": worst, "tolerance": TOLERANCE, **{name: list(values) for name, values in means.items()}})
    )
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
