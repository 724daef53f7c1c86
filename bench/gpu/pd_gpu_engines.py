"""The processes of `bench.gpu.pd_gpu`: a prefill engine, a decode engine, a router, and the memory of their GPUs."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.engine_gpu_start import free_port, get

LIMIT_S = 150.0
ROLES: Mapping[str, str] = {"p": "prefill", "d": "decode"}
FREED = 0.98
"""Part of an engine's memory that must be free again; engines of one GPU have equal parts of what is in use."""
FREED_S = 30.0


@dataclass
class Started:
    process: subprocess.Popen[bytes]
    port: int
    gpu: str = ""


class Engines:
    """Processes by name: engines `p` and `d`, and `router`."""

    def __init__(
        self, model: Path, folder: Path, out: Path, device: str, cache_gib: float | None, max_model_len: int = 16384
    ) -> None:
        """`cache_gib`: of each engine; None: what its GPU has."""
        self.max_model_len = max_model_len if device == "cuda" else 2048
        self.model, self.folder, self.out, self.device, self.cache_gib = model, folder, out, device, cache_gib
        self.started: dict[str, Started] = {}
        self.key = folder / "key"
        self.key.write_text(secrets.token_hex(32))
        self._version = 0

    def start(self, name: str, role: str, gpu: str) -> None:
        port = free_port()
        config: dict[str, Any] = {
            "listen": {"host": "127.0.0.1", "port": port}, "device": self.device, "role": role,
            "model": {"path": str(self.model), "names": ["m"]},
            "scheduler": {"max_model_len": self.max_model_len},
        }  # fmt: skip
        if role != "colocated":
            config["transfer"] = {"listen": "127.0.0.1:0", "key_file": str(self.key)}
        if self.cache_gib is not None:
            config["cache"] = {"memory_bytes": int(self.cache_gib * 2**30)}
        self._run(name, "stoker.engine", config, port, gpu)

    def start_router(self, roles: Mapping[str, str] = ROLES, module: str = "stoker.router") -> None:
        port = free_port()
        backends = [
            {"url": f"http://127.0.0.1:{self.port(name)}", "pod_uid": name, "role": role, "host": "here"}
            for name, role in roles.items()
        ]  # fmt: skip
        (self.folder / "backends.json").write_text(json.dumps({"version": 1, "backends": backends}))
        config = {
            "deployment": "bench", "listen": {"host": "127.0.0.1", "port": port}, "policy": "cacheAware",
            "backends_file": str(self.folder / "backends.json"), "hold_s": 30.0,
        }  # fmt: skip
        self._run("router", module, config, port, "")
        self._wait("router", "/readyz")

    def _run(self, name: str, module: str, config: dict[str, Any], port: int, gpu: str) -> None:
        if name in self.started:  # the router knows it by its address
            port = config["listen"]["port"] = self.started[name].port
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(config))
        visible = {"CUDA_VISIBLE_DEVICES": gpu} if self.device == "cuda" else {}
        environment = os.environ | {"STOKER_POD_UID": name} | visible
        with (self.out / f"pd-{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(file)], stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self.started[name] = Started(process, port, gpu)

    def port(self, name: str) -> int:
        return self.started[name].port

    def gpu(self, name: str) -> str:
        return self.started[name].gpu

    def status(self, name: str) -> dict[str, Any]:
        return dict(get(self.port(name), "/status"))

    def endpoint(self, name: str) -> str:
        """Where other engines call this one."""
        return str(self.status(name)["peer"]["endpoint"])

    def wait_until_ready(self, *, need_peer: bool = True) -> float:
        """Seconds until every engine serves, and knows its peer object where others call it."""
        begun_s = time.monotonic()
        for name in self.started:
            self._wait(name, "/readyz")
            while need_peer and name != "router" and self.status(name).get("peer") is None:
                time.sleep(0.05)
        return round(time.monotonic() - begun_s, 1)

    def _wait(self, name: str, path: str) -> None:
        one, until_s = self.started[name], time.monotonic() + LIMIT_S
        while not self._answers(one.port, path):
            if one.process.poll() is not None or time.monotonic() > until_s:
                log = (self.out / f"pd-{name}.log").read_text()[-2000:]
                raise SystemExit(f"{name} is not ready (exit {one.process.poll()}):\n{log}")
            time.sleep(0.1)

    @staticmethod
    def _answers(port: int, path: str) -> bool:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def kill(self, name: str) -> None:
        """Kill all processes of an engine at once."""
        os.killpg(self.started[name].process.pid, signal.SIGKILL)
        self.started[name].process.wait()

    def memory_used(self) -> dict[str, float]:
        """GiB in use on each GPU; empty without GPUs."""
        if self.device != "cuda":
            return {}
        query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
        return {index.strip(): round(float(used) / 1024, 2) for index, used in (line.split(",") for line in lines)}

    async def wait_until_free(self, name: str, before: dict[str, float], killed_s: float) -> float | str:
        """Seconds from the kill until the engine's memory is free. `before`: GiB in use on each GPU."""
        if self.device != "cuda":
            return 0.0
        sharing = sum(one.gpu == self.gpu(name) for one in self.started.values())
        left = before[self.gpu(name)] * (1 - FREED / sharing)
        used = float("inf")
        while time.monotonic() - killed_s < FREED_S:
            used = (await asyncio.to_thread(self.memory_used))[self.gpu(name)]
            if used <= left:
                return round(time.monotonic() - killed_s, 2)
            await asyncio.sleep(0.05)
        return f"{used} GiB are in use after {FREED_S} s"

    def close(self) -> None:
        for one in self.started.values():
            if one.process.poll() is None:
                os.killpg(one.process.pid, signal.SIGKILL)
                one.process.wait()
