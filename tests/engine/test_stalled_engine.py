"""A real engine whose core process is stopped.

It is no longer ready, then not alive, and recovers when the process goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.engine.core.core_watch import WatchLimits
from stoker.engine.core_start import core_command
from stoker.model.tokenizer import Tokenizer
from testing.engine.serving import events, run
from tests.engine.test_server_program import COMPLETIONS, program, until_answers
from tests.engine.test_server_real import write_model

START_S = 300
"""Time until a core has imported torch on a machine with other work."""
QUIET_S = 8
"""Longer than a busy machine keeps the core from its processors, while it is not stopped."""


def test_a_stopped_core_is_noticed_and_its_streams_go_on_after_it(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    (tmp_path / "work").mkdir()
    settings: dict[str, Any] = {
        "model": {"path": str(tmp_path / "tiny"), "dtype": "float32"},
        "cache": {"num_blocks": 60, "block_size": 4},
        "threads": 1,
        "device": "cpu",
    }

    def command(config_file: Path, address: str) -> Sequence[str]:
        start = f'echo $$ > {tmp_path}/pid; exec "$@"'
        return ["sh", "-c", start, "sh", *core_command(config_file, address), "--quiet-s", str(QUIET_S)]

    async def scenario() -> None:
        limits = WatchLimits(dead_factor=1.2, dead_floor_s=0)
        async with program(tmp_path / "work", command, Tokenizer.open, watch=limits, **settings) as p:
            await until_answers(p, "/readyz", 200, START_S)
            body = {"prompt": "fox", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
            alone = await p.http.post(COMPLETIONS, json=body)  # every size of step has been seen after it
            while p.engine.links[0].watch.usual_step_s is None:  # until a heartbeat reports it
                await asyncio.sleep(0.1)
            pid = int((tmp_path / "pid").read_text())
            async with p.http.stream("POST", COMPLETIONS, json={**body, "stream": True}, timeout=120) as answer:
                lines = answer.aiter_lines()
                first = await anext(lines)
                try:
                    os.kill(pid, signal.SIGSTOP)
                    await until_answers(p, "/readyz", 503, START_S)
                    message = (await p.http.get("/status")).json()["message"]
                    assert message.startswith("EngineStalled: no news from the core for ")
                    assert "usual step 0." in message
                    await until_answers(p, "/livez", 503, START_S)
                finally:
                    os.kill(pid, signal.SIGCONT)
                rest = [line async for line in lines]
            *chunks, done = events("\n\n".join([first, *filter(None, rest)]))
            assert done == "[DONE]"
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert text == alone.json()["choices"][0]["text"]
            await until_answers(p, "/readyz", 200, START_S)
            await until_answers(p, "/livez", 200)

    run(scenario, START_S + 300)
