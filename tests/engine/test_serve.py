"""`stoker serve`: an error of the command line is one line, printed before anything is loaded."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.config import EngineConfig
from stoker.engine.core.messages import CoreState
from stoker.engine.serve import _parser, _Progress, engine_config, main
from stoker.pod.config_file import ConfigError, parse


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 64
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.rstrip("\n")


def test_what_is_no_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("text")
    assert refused(capsys, tmp_path / "gone") == (
        f"stoker serve: {tmp_path}/gone does not exist; a folder or a GGUF file is needed"
    )
    assert refused(capsys, tmp_path / "notes.txt") == f"stoker serve: {tmp_path}/notes.txt is not a GGUF file"
    assert refused(capsys, tmp_path).endswith(
        "neither a Hugging Face folder (config.json) nor a checkpoint folder (manifest.json)"
    )


def test_a_directory_of_models_stands_instead_of_a_path(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        ([model, "--max-models", 2], "--max-models needs --models-dir"),
        ([model, "--models-dir", model.parent], "--models-dir takes neither a model's path nor --served-name: "),
        (["--models-dir", "/gone"], "--models-dir /gone is not a folder"),
        (["--models-dir", model.parent, "--max-models", 0], "--max-models must be at least 1, got 0"),
        (["--models-dir", model.parent, "--threads", 0], "stoker serve: threads: "),
    ):
        assert message in refused(capsys, *flags)


def test_an_empty_name_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "model.names.0: String should have at least 1 character" in refused(capsys, model, "--served-name", "")


def test_a_name_of_two_lines_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "model.names: names must have no line breaks and no control characters, got 'a\\nb'"
    assert message in refused(capsys, model, "--served-name", "a\nb")


def test_a_name_that_is_given_twice_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--served-name", "one", "--served-name", "two", "--served-name", "one"]
    assert "model.names: names must differ from each other, 'one' is there twice" in refused(capsys, model, *flags)


def test_the_secret_of_a_hand_over_that_is_off_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_bytes(bytes(32))
    message = refused(capsys, model, "--transfer-key-file", tmp_path / "key")
    assert message.startswith("stoker serve: transfer: key_file needs listen, the HOST:PORT at which other engines")


@pytest.mark.parametrize("unused", [{"key_file": "/key"}, {"transports": ["tcp"]}, {"require": "rdma"}], ids=str)
def test_settings_of_a_hand_over_that_is_off_are_refused(unused: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"config: transfer: {next(iter(unused))} needs listen"):
        parse(EngineConfig, {"model": {"path": "m"}, "transfer": unused})
    parse(EngineConfig, {"model": {"path": "m"}, "transfer": {**unused, "listen": "127.0.0.1:7000"}})


def test_a_name_of_the_hub_is_no_path(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "HuggingFaceTB/SmolLM2-135M-Instruct")
    assert "is not on this machine" in message
    assert "give hf://HuggingFaceTB/SmolLM2-135M-Instruct" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-such-option"], "stoker serve: error: "),
        ([], "stoker serve: error: the path of a model is needed, or --models-dir"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 64
    assert message in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "tokenizer.json").unlink()
    assert refused(capsys, model) == f"stoker serve: {model}: tokenizer.json is missing"


def test_a_folder_of_checkpoints_names_its_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (3, 6):
        folder = tmp_path / f"step-0000000{step}.1a2b3c4d"
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
    assert refused(capsys, tmp_path).endswith(f"it holds checkpoints, such as {tmp_path}/step-00000006.1a2b3c4d")


def test_options_that_cannot_be_used_are_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, model, "--port", 99999).startswith("stoker serve: listen.port: ")
    assert refused(capsys, model, "--api-key-file", "/gone") == "stoker serve: /gone: No such file or directory"
    assert refused(capsys, model, "--api-key-file", model) == f"stoker serve: {model}: Is a directory"
    assert refused(capsys, model, "--threads", 10**20).startswith("stoker serve: threads: ")
    assert refused(capsys, model, "--data", 99999).startswith("stoker serve: parallelism.data: ")
    many = refused(capsys, model, "--max-batch-tokens", 10**13)
    assert many.startswith("stoker serve: scheduler.max_batch_tokens: Input should be less than or equal to 1048576")
    for origin in ("example.org", "https://example.org/"):
        message = f"api.allowed_origins: *, null or SCHEME://HOST[:PORT] without a path is needed, got {origin!r}"
        assert message in refused(capsys, model, "--allowed-origins", origin)
    (model / "keys").write_bytes(b"\xff")
    assert "one per line in UTF-8 (byte 0 is not)" in refused(capsys, model, "--api-key-file", model / "keys")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refused(capsys, model, "--port", port) == f"stoker serve: 127.0.0.1:{port}: Address already in use"


def test_a_log_is_not_filled_with_percents(capsys: pytest.CaptureFixture[str]) -> None:
    progress = _Progress(parse(EngineConfig, {"model": {"path": "m", "names": ["m"]}, "listen": {"host": "::1"}}))
    progress.listening(8000)
    for message in ("starting", "LoadingWeights 1 %", "LoadingWeights 2 %", "AllocatingCache"):
        progress.state(CoreState("Loading", message))
    progress.state(CoreState("Serving", ""))
    assert capsys.readouterr().err.splitlines() == [
        "Loading starting",
        "Loading LoadingWeights 1 %",
        "Loading AllocatingCache",
        "Serving m on http://[::1]:8000/v1",
        "Talk to it:  stoker chat http://[::1]:8000",
    ]


@pytest.mark.parametrize(
    ("flags", "origins"),
    [
        pytest.param([], (), id="none"),
        pytest.param(["--allowed-origins", "*"], ("*",), id="any"),
        pytest.param(["--allowed-origins", "https://a", "--allowed-origins", "https://b"], ("https://a", "https://b"),
                     id="repeated"),
        pytest.param(["--allowed-origins", '["https://a", "https://b"]'], ("https://a", "https://b"), id="as in vLLM"),
    ],
)  # fmt: skip
def test_allowed_origins_reach_the_configuration(flags: list[str], origins: tuple[str, ...]) -> None:
    arguments = _parser().parse_args([*flags, "model"])
    assert parse(EngineConfig, engine_config(arguments), "x").api.allowed_origins == origins


def test_parsers_reach_the_configuration() -> None:
    flags = ["--tool-call-parser", "mistral", "--reasoning-parser", "think", "model"]
    api = parse(EngineConfig, engine_config(_parser().parse_args(flags)), "x").api
    assert (api.tool_call_parser, api.reasoning_parser) == ("mistral", "think")
    api = parse(EngineConfig, engine_config(_parser().parse_args(["model"])), "x").api
    assert (api.tool_call_parser, api.reasoning_parser) == ("auto", "auto")


def test_experts_on_the_device_reach_the_configuration() -> None:
    for flags, expected in ((["--experts-on-device", "5"], 5), ([], None)):
        config = parse(EngineConfig, engine_config(_parser().parse_args([*flags, "model"])), "x")
        assert config.experts.on_device == expected


def test_a_list_of_origins_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("[1]", "[", "[*]"):
        with pytest.raises(SystemExit):
            _parser().parse_args(["--allowed-origins", wrong, "model"])
        said = capsys.readouterr().err
        assert "argument --allowed-origins: " in said
        assert repr(wrong) in said
