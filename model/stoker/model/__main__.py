"""The program `stoker model`: convert and describe weights."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from stoker.pod.causes import EXIT_CODES, Cause, CauseRule, cause_of_error
from stoker.pod.command_line import run_click


@click.group(
    epilog="Exit codes: 0 done, 64 wrong command line or no model at the path, 66 the model cannot be used, "
    "67 checkpoint corrupt, 68 disk error.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
def main() -> None:
    """Convert and describe the weights of models."""


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Type of the written weights. Default: the file's own, or float32 where it is quantised.",
)
def convert(file: Path, out: Path, dtype: str | None) -> None:
    """Convert the GGUF file FILE to the Hugging Face folder OUT, with tokenizer and chat template.

    Example: stoker model convert model.gguf model/
    """
    if out.exists():
        raise click.UsageError(f"OUT: {out} exists already; choose another folder or delete it")
    import torch  # after the arguments are checked: importing torch takes seconds

    from stoker.model.weights.gguf_weights import convert as convert_gguf

    began, chosen = time.monotonic(), None if dtype is None else getattr(torch, dtype)
    with refusing():
        convert_gguf(file, out, dtype=chosen, progress=progress_line(f"converting {file.name}"))
    click.echo(f"wrote {out} in {time.monotonic() - began:.1f} s")


@main.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(path: Path, as_json: bool) -> None:
    """Describe the weights at PATH: a Hugging Face folder, a GGUF file or a checkpoint folder.

    Example: stoker model info model/
    """
    from stoker.model.weights.source import open_weights  # imports torch

    with refusing():
        source = open_weights(path)
    facts: dict[str, Any] = {
        "path": str(path),
        "kind": source.kind,
        "dtype": str(source.dtype).removeprefix("torch."),
        "parameters": source.config.num_parameters,
        "config": source.config.to_hugging_face(),
        "files": sorted(source.tokenizer_files),
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    config = source.config
    click.echo(
        f"{path}: {source.kind}, {config.architecture}, {config.num_parameters / 1e6:.1f} M parameters in "
        f"{facts['dtype']}"
    )
    click.echo(
        f"layers {config.num_layers}, hidden {config.hidden_size}, heads {config.num_heads} ({config.num_kv_heads} kv) "
        f"of {config.head_dim}, ffn {config.intermediate_size}"
    )
    click.echo(
        f"vocabulary {config.vocab_size}, context {config.max_position_embeddings} tokens, embeddings "
        f"{'tied' if config.tie_embeddings else 'untied'}"
    )
    click.echo(f"files: {', '.join(facts['files']) or 'none'}")


class refusing:  # noqa: N801  reads as a statement
    """Foreign input that is refused ends with its message and the code of its cause, not with a stack."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError | OSError):
            click.ClickException(message_of(error)).show()
            sys.exit(EXIT_CODES[cause_of_error(error, refusal_causes(), Cause.INTERNAL)])


def message_of(error: ValueError | OSError) -> str:
    """Return what an error says, without Python's number of an error of the disk."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def refusal_causes() -> tuple[CauseRule, ...]:
    """The causes of what is refused; the first that fits counts."""
    from stoker.checkpoint.errors import CheckpointError, StorageUnusable  # imported already with the weights
    from stoker.model.weights.loading import NoWeights

    return (
        CauseRule(NoWeights, Cause.CONFIG_INVALID),
        CauseRule(StorageUnusable, Cause.CONFIG_INVALID),
        CauseRule(CheckpointError, Cause.CHECKPOINT_CORRUPT),
        CauseRule(ValueError, Cause.MODEL_ERROR),
        CauseRule(OSError, Cause.STORAGE_ERROR),
    )


def progress_line(what: str) -> Any:
    """Show progress as one growing line on a terminal, and nothing in a log."""

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r{what}: {done / total:4.0%}", nl=done == total, err=True)

    return show


if __name__ == "__main__":
    run_click(main, "stoker model")
