"""An engine whose model is elsewhere: fetched into the cache before it is opened, with its progress and digest."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.engine.config import EngineConfig, ServedModelConfig
from stoker.engine.core.fetched_model import with_fetched_model
from stoker.engine.serve import main
from testing.checkpoint.s3_server import S3Server


def test_a_uri_becomes_a_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as server:
        server.objects["models/tiny/config.json"] = b"{}"
        for name, value in {**server.environment, "STOKER_MODEL_CACHE": str(tmp_path / "user")}.items():
            monkeypatch.setenv(name, value)
        for cache in (None, str(tmp_path / "own")):
            model = ServedModelConfig(path="s3://models/tiny", cache=cache, names=("t",))
            seen: list[str] = []
            config, digest = with_fetched_model(EngineConfig(model=model), seen.append)
            assert Path(config.model.path).parent == Path(cache or tmp_path / "user")
            assert (Path(config.model.path) / "config.json").read_bytes() == b"{}"
            assert (config.model.names, str(digest)[:7]) == (("t",), "sha256:")
            assert (seen[0], seen[-1]) == ("FetchingModel", "FetchingModel 100 %")


def test_a_path_stays_as_it_is() -> None:
    config = EngineConfig(model=ServedModelConfig(path="/models/a"))
    assert with_fetched_model(config) == (config, None)


def test_serve_refuses_a_wrong_uri_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hf://nothing"]) == 64
    assert "'hf://nothing' names no model; allowed: hf://ORGANISATION/NAME" in capsys.readouterr().err
