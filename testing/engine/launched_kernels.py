"""Lists of the kernels that engines launch, and a small build of some: a process of its own prints them as JSON.

Triton's settings and what it compiles stay with the process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from stoker.engine.core.kernel_warmup import AT_START, WarmupLoad, compile_kernels
from stoker.engine.core.kernels_ahead import AssumedTokens, ServerSizes, launch_kernels, plan_ahead
from stoker.engine.execution.executor import InProcess
from stoker.model.config import ModelConfig
from stoker.model.kernels.ahead.absent_gpu import absent_gpu
from stoker.model.kernels.ahead.build import compiling_into
from stoker.model.kernels.ahead.driver_library import stand_in_driver
from stoker.model.kernels.ahead.layered_cache import use_shipped_kernels
from stoker.model.kernels.ahead.manifest import KernelsManifest
from stoker.model.kernels.ahead.products import ShapesOnly
from stoker.model.kernels.fused.norm import forward_kernel
from stoker.model.kernels.ops import Ops

TINY = ModelConfig(
    architecture="qwen3",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
)
SHIPPED = ServerSizes(max_requests=24, max_batch_tokens=1024, max_model_len=2048)
SERVERS = {
    "another longest sequence": replace(SHIPPED, max_model_len=301),
    "one block": replace(SHIPPED, max_model_len=64, max_requests=3),
    "one request at a time": replace(SHIPPED, max_requests=1, max_batch_tokens=300),
    "odd sizes": ServerSizes(max_requests=37, max_batch_tokens=777, max_model_len=999),
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    shipped = launched(SHIPPED)
    start = launched(SHIPPED, partial(run_load, AT_START))
    others = {"the start": start, **{name: launched(sizes) for name, sizes in SERVERS.items()}}
    facts = {
        "shipped": sorted({name.rpartition(".")[2] for name, _ in shipped}),
        "missing": {name: sorted(other - shipped) for name, other in others.items()},
        "start": len(start),
        "of smaller blocks": len(launched(replace(SHIPPED, block_size=32)) - shipped),
    }
    print(json.dumps(facts | (built(folder) if shutil.which("gcc") else {})))


def launched(sizes: ServerSizes, launch: Any = launch_kernels) -> set[tuple[str, str]]:
    with listing_launches(90) as launches:
        launch(TINY, sizes)
    return set(launches)


@contextlib.contextmanager
def listing_launches(architecture: int) -> Iterator[dict[tuple[str, str], str]]:
    """List what is launched on CPU tensors inside, and compile nothing: (module and name, Triton's key) -> name."""
    launches: dict[tuple[str, str], str] = {}
    listed: list[tuple[dict[Any, Any], Any]] = []

    def note(*, key: Any, fn: Any, **_: Any) -> bool:
        launches[f"{fn.module}.{fn.name}", str(key)] = fn.name
        kernels = fn.jit_function.device_caches[triton.runtime.driver.active.get_current_device()][0]
        kernels[key] = Listed()
        listed.append((kernels, key))
        return True  # do not compile

    with triton.knobs.runtime.scope(), absent_gpu(architecture), ShapesOnly():
        triton.knobs.runtime.jit_cache_hook = note
        try:
            yield launches
        finally:
            for kernels, key in listed:
                del kernels[key]


class Listed:
    """A stand-in for a kernel that has been listed: its further launches do nothing.

    Without it each of them describes all arguments again, two fifths of all time.
    """

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        return None


def run_load(load: WarmupLoad, config: ModelConfig, sizes: ServerSizes) -> None:
    plan, ops, device = plan_ahead(config, sizes), Ops("fused"), torch.device("cpu")
    compile_kernels(plan, config, ops, device, None, load, lambda runner: InProcess(AssumedTokens(runner)))


def built(folder: Path) -> dict[str, Any]:
    """Compile a norm, then launch it as a later process does, with an empty cache of the user's; then another norm."""
    with compiling_into(folder / "shipped", 90) as compiled:
        norm(64)
    KernelsManifest(triton.__version__, (90,), ("norm",), len(compiled.names)).write(folder / "shipped")
    again = launch_shipped(folder, 64)
    return {
        "built": sorted(compiled.names.values()),
        "found": again,
        "written": (folder / "own").exists(),
        "other": launch_shipped(folder, 40),
    }


def launch_shipped(folder: Path, columns: int) -> list[list[str]]:
    forward_kernel.device_caches.clear()
    with triton.knobs.cache.scope(), stand_in_driver(), absent_gpu(90):
        triton.knobs.cache.dir = str(folder / "own")
        lookups = use_shipped_kernels({"STOKER_KERNELS": str(folder / "shipped")}, 90)
        assert lookups is not None
        norm(columns)
    return [lookups.shipped, lookups.kept, lookups.compiled]


def norm(columns: int) -> None:
    Ops("fused").rms_norm(torch.zeros(3, columns), torch.ones(columns), 1e-6)


def in_a_process(folder: Path) -> Any:
    """Run this file in a process of its own, whose kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "testing.engine.launched_kernels", str(folder)],
        env=environment, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
