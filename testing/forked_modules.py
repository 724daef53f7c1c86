"""What the server of `forked` imports once, before it forks.

torch would import its compiler at the first recomputation, in each process.
"""

from __future__ import annotations

from importlib import import_module

from stoker.pod.collection import imports

with imports():
    for module in (
        "torch._dynamo",
        "testing.trainer.layouts",
        "testing.engine.data_ranks",
        "testing.engine.station_process",
        "stoker.engine.core.run",
    ):
        import_module(module)
