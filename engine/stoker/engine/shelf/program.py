"""`stoker serve --models-dir`: the shelf's port, its pages and its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from stoker.engine.config import EngineConfig
from stoker.engine.core.messages import CoreState
from stoker.engine.http.api_keys import load_api_keys
from stoker.engine.http.server import OpenAiServer
from stoker.engine.program import Engine, Environment
from stoker.engine.shelf.folders import ModelFolder, model_folders
from stoker.engine.shelf.model_check import check_head
from stoker.engine.shelf.shelf import ModelShelf
from stoker.pod.causes import Cause
from stoker.pod.http import probe_routes
from stoker.pod.installed_version import installed_version
from stoker.pod.serve import Server, bind_tcp
from stoker.pod.termination_message import TerminationMessage

ConfigOf = Callable[[ModelFolder], EngineConfig]
MEMINFO = Path("/proc/meminfo")


class ShelfRegistry(CollectorRegistry):
    """The metrics of the shelf and of every loaded model, which have its name as a label."""

    shelf: ModelShelf | None = None

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        engines = [entry.engine for entry in (self.shelf.entries if self.shelf else {}).values()]
        registries = [engine.registry for engine in engines if engine is not None]
        collected = [super().collect(), *(registry.collect() for registry in registries)]
        for family in chain.from_iterable(collected):
            known = families.setdefault(family.name, family)
            if known is not family and not family.name.startswith("process_"):  # one for this process is enough
                known.samples.extend(family.samples)
        yield from families.values()


class ShelfProgram:
    """A directory of models behind one port."""

    def __init__(
        self,
        directory: Path,
        config_of: ConfigOf,
        folder: Path,
        *,
        max_models: int | None = None,
        environment: Environment = Environment(),  # noqa: B008 - frozen
        check: Callable[[ModelFolder], None] = check_head,
    ) -> None:
        """`config_of`: the configuration of a model's engine; `folder`: for the engines' sockets; `check`: refuses a
        model that cannot be loaded."""
        self.folder, self.config_of, self.environment = folder, config_of, environment
        self.config = config_of(ModelFolder("", directory, 0))
        self.stop = asyncio.Event()
        self.began_s = time.monotonic()
        self._started = 0
        registry = ShelfRegistry()
        on_gpu = self.config.device != "cpu" and Path("/dev/nvidiactl").exists()
        self.shelf = registry.shelf = ModelShelf(
            lambda: model_folders(directory),
            self._engine,
            max_models=max_models if max_models is not None else (1 if on_gpu else 64),
            check=check,
            cache_bytes=self.config.cache.memory_bytes or 0,
            free_bytes=(lambda: None) if on_gpu else available_bytes,
            registry=registry,
        )
        probes = probe_routes(alive=lambda: True, ready=lambda: self.shelf.ready, status=self.status, registry=registry)
        self.app = OpenAiServer(
            self.shelf,
            list(probes),
            api_keys=load_api_keys(self.config.api.api_key_file),
            max_body_bytes=self.config.api.max_body_bytes,
            max_body_bytes_in_flight=self.config.listen.limits.max_body_bytes_in_flight,
            allowed_origins=self.config.api.allowed_origins,
            version=installed_version(),
            comment_interval_s=self.config.listen.limits.comment_interval_s,
        )

    def _engine(self, model: ModelFolder, on_state: Callable[[CoreState], None]) -> Engine:
        self._started += 1
        folder = self.folder / str(self._started)
        folder.mkdir()
        return Engine(self.config_of(model), replace(self.environment, on_state=on_state), folder)

    async def run(self) -> TerminationMessage:
        """Serve until a signal; running requests may end.

        Raises:
            OSError: the port is taken.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self.stop.set)
        listen = self.config.listen
        server = Server(self.app, bind_tcp(listen.host, listen.port), listen.limits)
        await server.start()
        self.environment.on_listen(server.port)
        await self.stop.wait()
        await self.shelf.close()
        await server.stop(1)
        return TerminationMessage(cause=Cause.INTERRUPTED, detail="stopped after its requests")

    def status(self) -> Mapping[str, Any]:
        """The `/status` page: that of each loaded model, and what of the directory cannot be read."""
        return {
            "program": "engine",
            "models": {
                name: {
                    "status": entry.status,
                    "error": entry.error,
                    "engine": None if entry.engine is None else entry.engine.status(),
                }
                for name, entry in self.shelf.entries.items()
            },
            "unreadable": self.shelf.unreadable(),
            "uptime_s": round(time.monotonic() - self.began_s, 3),
        }


def available_bytes() -> int | None:
    """Main memory that a new process can have; None on systems that do not tell."""
    for line in MEMINFO.read_text().splitlines() if MEMINFO.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def run_shelf(
    directory: Path, config_of: ConfigOf, *, max_models: int | None, on_listen: Callable[[int], None]
) -> TerminationMessage:
    """Serve a directory of models until a signal."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-")))

        async def run() -> TerminationMessage:
            environment = Environment(on_listen=on_listen)
            program = ShelfProgram(directory, config_of, folder, max_models=max_models, environment=environment)
            return await program.run()

        return asyncio.run(run())
