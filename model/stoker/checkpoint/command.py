"""The command line: `verify`, `show`, `diff`, `export` and `list` for people, `task ...` for task pods.

Facts go to standard output (`--json` for programs), progress and errors to standard error.

Run by `__main__` and by `stoker checkpoint`; owns the options and the output, no logic of the format.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click

from stoker.checkpoint import task as tasks
from stoker.checkpoint.diff import diff
from stoker.checkpoint.errors import CheckpointError, CheckpointExists, StorageUnusable
from stoker.checkpoint.export import SHARD_BYTES, Dtype, export_adapter, export_hugging_face
from stoker.checkpoint.facts import facts_of
from stoker.checkpoint.manifest_file import read_manifest
from stoker.checkpoint.place import exists, storage_of
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.remote.listing import RemoteFile
from stoker.checkpoint.remote.model_uri import parse_model_uri
from stoker.checkpoint.store import Broken, CheckpointRoot, Found
from stoker.checkpoint.transfer_commands import pull, push, pushed_facts
from stoker.checkpoint.verify import OnProgress, verify
from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.command_line import run_click
from stoker.pod.termination_message import TerminationMessage

DIFFERENT = 1
"""Exit code of `diff` when the two differ, as in diff(1)."""

FOLDER = click.Path(path_type=Path)


class ModelUriType(click.ParamType):  # type: ignore[type-arg]
    """A text that names a model elsewhere; a wrong one is a wrong command line."""

    name = "uri"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_model_uri(value)
        except CheckpointError as error:
            self.fail(str(error), param, ctx)
        return value


as_json = click.option("--json", "json_output", is_flag=True, help="Print one JSON object.")


def main() -> NoReturn:
    """Run the program; a wrong command line ends with the table's code for it."""
    run_click(program, "stoker checkpoint")


@click.group(
    epilog="Exit codes: 0 good, 1 different (diff), 64 wrong command line, 67 checkpoint missing or corrupt, "
    "68 disk error.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
def program() -> None:
    """Verify, show, compare, list, export, push and pull Stoker checkpoints."""


@program.command("verify", epilog="Example: stoker checkpoint verify runs/tiny/step-00001200.1a2b3c4d")
@click.argument("folder", type=FOLDER)
@click.option("--digest", help="The manifest digest that the checkpoint must have.")
@as_json
def verify_command(folder: Path, digest: str | None, json_output: bool) -> int:
    """Verify the checkpoint FOLDER.

    Reads every byte and checks hashes, sizes, and that the pieces leave no gap and no overlap.
    """
    with _errors(), _progress("verifying") as progress:
        report = verify(folder, digest, progress=progress)
    if json_output:
        _print_json(report.as_json())
    elif report.ok:
        click.echo(f"ok: step {report.step}, {report.tensors} tensors, {report.pieces} pieces, {_size(report.bytes)}")
        click.echo(f"digest {report.digest}")
    else:
        click.echo("\n".join(["not ok:", *report.problems]))
    return 0 if report.ok else EXIT_CODES[Cause.CHECKPOINT_CORRUPT]


@program.command("show", epilog="Example: stoker checkpoint show --tensors runs/tiny/step-00001200.1a2b3c4d")
@click.argument("folder", type=FOLDER)
@click.option("--tensors", "with_tensors", is_flag=True, help="List every tensor with its shape and dtype.")
@as_json
def show_command(folder: Path, with_tensors: bool, json_output: bool) -> int:
    """Show the facts of the checkpoint FOLDER. Reads the manifest only."""
    with _errors():
        manifest = read_manifest(folder, storage_of(folder))
    facts = facts_of(manifest).as_json()
    listed = [
        {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype}
        for tensor in sorted(manifest.tensors.values(), key=lambda tensor: tensor.name)
    ]
    if json_output:
        _print_json(facts | {"meta": dict(manifest.meta)} | ({"tensor_list": listed} if with_tensors else {}))
        return 0
    for key, value in facts.items():
        click.echo(f"{key:<13} {_size(value) if key == 'bytes' else _plain(value)}")
    if with_tensors:
        for item in listed:
            click.echo(f"  {item['dtype']:<10} {item['shape']!s:<20} {item['name']}")
    return 0


def finite_from_0(_context: click.Context, option: click.Parameter, value: float) -> float:
    """Return the value of an option. Raises click.BadParameter: every difference is within a `nan` or an `inf`."""
    if not 0 <= value < math.inf:
        raise click.BadParameter(f"a finite number, 0 or more, is needed (got {value:g})", param=option)
    return value


@program.command("diff", epilog="Example: stoker checkpoint diff --only model. runs/a/step-... runs/b/step-...")
@click.argument("first", type=FOLDER)
@click.argument("second", type=FOLDER)
@click.option(
    "--only", default="", metavar="PREFIX", help="Compare only tensors whose names begin with PREFIX, and no files."
)
@click.option(
    "--tolerance",
    type=float,
    default=0.0,
    callback=finite_from_0,
    help="Largest allowed absolute difference; 0 compares bits.",
)
@as_json
def diff_command(first: Path, second: Path, only: str, tolerance: float, json_output: bool) -> int:
    """Compare the values of two checkpoints, whatever layouts wrote them.

    The exit code is 1 when they differ.
    """
    with _errors():
        readers = CheckpointReader(first), CheckpointReader(second)
        names = {name for reader in readers for name in reader.manifest.tensors}
        if not any(name.startswith(only) for name in names):
            _fail(f"--only {only}: no tensor of either checkpoint has a name that begins so", Cause.CONFIG_INVALID)
        differences = diff(*readers, prefix=only, tolerance=tolerance)
    if json_output:
        _print_json({"same": not differences, "differences": [item.as_json() for item in differences]})
    else:
        for item in differences:
            counted = (
                f"{item.elements} elements, at most {item.max_abs} apart" if item.kind == "values" else item.detail
            )
            click.echo(f"{item.name}: {item.kind} {counted}".rstrip())
        click.echo("the same" if not differences else f"{len(differences)} differences")
    return DIFFERENT if differences else 0


@program.command(
    "export", epilog="Example: stoker checkpoint export --format hf --dtype bfloat16 runs/tiny/step-... out/"
)
@click.argument("folder", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option(
    "--format",
    "export_format",
    type=click.Choice(["hf", "peft"]),
    default="hf",
    help="Format of OUT; hf is a Hugging Face folder (adapters are merged), peft the adapters of a LoRA run alone.",
)
@click.option(
    "--dtype",
    type=click.Choice(["stored", "float32", "bfloat16", "float16"]),
    default="stored",
    help="Type of the written weights; stored converts nothing.",
)
@click.option(
    "--shard-bytes",
    type=click.IntRange(min=1),
    default=SHARD_BYTES,
    show_default=True,
    help="Largest weight file, in bytes.",
)
@as_json
def export_command(
    folder: Path, out: Path, export_format: str, dtype: Dtype, shard_bytes: int, json_output: bool
) -> int:
    """Export the weights of FOLDER, with config and tokenizer, to the new folder OUT."""
    with _errors():
        reader = CheckpointReader(folder)
        if export_format == "peft":
            done = export_adapter(reader, out, dtype=dtype)
        else:
            done = export_hugging_face(reader, out, dtype=dtype, shard_bytes=shard_bytes)
    if json_output:
        _print_json(
            {
                "format": export_format,
                "folder": done.folder,
                "tensors": done.tensors,
                "bytes": done.bytes,
                "files": list(done.files),
            }
        )
    else:
        click.echo(f"{done.folder}: {done.tensors} tensors, {_size(done.bytes)}, files {', '.join(done.files)}")
    return 0


@program.command("push", epilog="Example: stoker checkpoint push runs/tiny/step-00001200.1a2b3c4d hf://team/tiny@main")
@click.argument("folder", type=FOLDER)
@click.argument("uri", type=ModelUriType())
@click.option(
    "--dtype",
    type=click.Choice(["stored", "float32", "bfloat16", "float16"]),
    default="stored",
    show_default=True,
    help="Type of the written weights; stored converts nothing.",
)
@click.option("--replace", is_flag=True, help="Take the place of another model below the prefix of a bucket.")
@click.option("--work", type=click.Path(path_type=Path, file_okay=False), help="Folder for the exported files.")
@as_json
def push_command(folder: Path, uri: str, dtype: Dtype, replace: bool, work: Path | None, json_output: bool) -> int:
    """Push the checkpoint FOLDER, in Hugging Face's form with adapters merged, to URI, and check what arrived.

    URI is hf://ORG/NAME[@BRANCH], s3://BUCKET/PREFIX or oci://REGISTRY/REPOSITORY[:TAG]. Access: HF_TOKEN, the
    variables of AWS, REGISTRY_USERNAME and REGISTRY_PASSWORD.
    """

    def sent(file: RemoteFile) -> None:
        click.echo(f"sending {file.name}, {_size(file.bytes)}", err=True)

    with _errors():
        done = push(folder, uri, dtype=dtype, replace=replace, work=work, sent=sent)
    if json_output:
        _print_json(pushed_facts(done))
    else:
        click.echo(f"{done.uri}: {done.files} files, {_size(done.bytes)}, digest {done.digest}")
    return 0


@program.command("pull", epilog="Example: stoker checkpoint pull hf://team/tiny tiny/")
@click.argument("uri", type=ModelUriType())
@click.argument("out", type=FOLDER)
@as_json
def pull_command(uri: str, out: Path, json_output: bool) -> int:
    """Fetch the model of URI into the new folder OUT; a pull that ended too early is continued."""
    with _errors(), _progress("fetching") as progress:
        done = pull(uri, out, progress or (lambda _done, _total: None))
    if json_output:
        _print_json(done)
    else:
        click.echo(f"{out}: {_size(int(str(done['bytes'])))}, digest {done['digest']}")
    return 0


@program.command("list", epilog="Example: stoker checkpoint list runs/tiny")
@click.argument("root", type=FOLDER)
@as_json
def list_command(root: Path, json_output: bool) -> int:
    """List the checkpoints below ROOT, newest first, and the folders that are not committed or cannot be read."""
    with _errors():
        if not exists(root):
            _fail(f"{root} {'is not a folder' if root.exists() else 'does not exist'}", Cause.CHECKPOINT_CORRUPT)
        items = CheckpointRoot(root).scan()
    if json_output:
        _print_json({"checkpoints": [_row(item) for item in items]})
    else:
        for item in items:
            click.echo(_line(item))
    return EXIT_CODES[Cause.STORAGE_ERROR] if any(map(_is_unread, items)) else 0


@program.group("task")
def task_group() -> None:
    """Run a task for the operator. The result goes into the termination message."""


def _task(name: str, *, with_folder: bool = True) -> Callable[[Callable[..., tasks.Result]], click.Command]:
    """Return a decorator that makes a task command; its function takes the options and returns the result."""

    def decorate(body: Callable[..., tasks.Result]) -> click.Command:
        def callback(termination_log: Path | None, **options: Any) -> int:
            folder = options.get("folder") or ""
            return _leave(tasks.run(lambda: body(**options), name, folder), termination_log)

        command = click.Command(name, callback=callback, help=body.__doc__, params=_task_options(with_folder))
        task_group.add_command(command)
        return command

    return decorate


def _task_options(with_folder: bool) -> list[click.Parameter]:
    options: list[click.Parameter] = [
        click.Option(["--root"], type=FOLDER, required=not with_folder, help="Folder that holds the checkpoints."),
        click.Option(
            ["--termination-log"], type=FOLDER, help="File for the termination message (default: standard output only)."
        ),
    ]
    if with_folder:
        options.append(
            click.Option(["--folder"], required=True, help="Checkpoint folder: a name below --root, or a path.")
        )
        options.append(click.Option(["--digest"], help="The manifest digest that the checkpoint must have."))
    else:
        options.append(click.Option(["--writer"], help="List only folders of this writer (8 hex digits)."))
        options.append(click.Option(["--after-step"], type=click.IntRange(0), help="List only saves after this step."))
    return options


@_task("verify")
def task_verify(root: Path | None, folder: str, digest: str | None) -> tasks.Result:
    """Verify every byte of a checkpoint."""
    return tasks.verify_task(tasks.Target(root, folder, digest))


@_task("inspect")
def task_inspect(root: Path | None, folder: str, digest: str | None) -> tasks.Result:
    """Report the facts of a checkpoint's manifest."""
    return tasks.inspect_task(tasks.Target(root, folder, digest))


@_task("import")
def task_import(root: Path | None, folder: str, digest: str | None) -> tasks.Result:
    """Report the facts of a checkpoint's manifest and verify every byte."""
    return tasks.import_task(tasks.Target(root, folder, digest))


@_task("delete")
def task_delete(root: Path | None, folder: str, digest: str | None) -> tasks.Result:
    """Remove the files that the manifest with --digest lists, then the empty folder."""
    return tasks.delete_task(tasks.Target(root, folder, digest))


@_task("list", with_folder=False)
def task_list(root: Path, writer: str | None, after_step: int | None) -> tasks.Result:
    """Report the committed checkpoints below --root, oldest first."""
    return tasks.list_task(root, writer, after_step)


def _leave(message: TerminationMessage, termination_log: Path | None) -> int:
    """Write the termination message, print it for logs, and return its exit code."""
    encoded = message.encode()
    if termination_log is not None:
        message.write(termination_log)
    click.echo(encoded.decode())
    return EXIT_CODES[message.cause]


def _is_unread(item: Found | Broken) -> bool:
    """Whether the storage failed, so that nothing is known of the checkpoint."""
    return isinstance(item, Broken) and isinstance(item.error, OSError)


def _line(item: Found | Broken) -> str:
    if isinstance(item, Broken):
        return f"{item.folder_name}  {'cannot be read' if _is_unread(item) else 'not committed'}: {item.problem}"
    facts = facts_of(item.manifest)
    return (
        f"{item.folder_name}  {_size(item.bytes):>9}  tokens {_plain(facts.tokens)}  loss {_plain(facts.loss)} "
        f" {item.digest[:16]}"
    )


def _row(item: Found | Broken) -> dict[str, Any]:
    if isinstance(item, Broken):
        committed = None if _is_unread(item) else False
        return {"folder": item.folder_name, "committed": committed, "problem": item.problem}
    return {"folder": item.folder_name, "committed": True} | facts_of(item.manifest).as_json()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (CheckpointExists, StorageUnusable) as error:
        _fail(str(error), Cause.CONFIG_INVALID)
    except CheckpointError as error:
        _fail(str(error), Cause.CHECKPOINT_CORRUPT)
    except OSError as error:
        _fail(str(error), Cause.STORAGE_ERROR)


def _fail(message: str, cause: Cause) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(EXIT_CODES[cause])


@contextmanager
def _progress(what: str) -> Iterator[OnProgress | None]:
    """Show progress as a line on a terminal, and nothing in a log."""
    if not sys.stderr.isatty():
        yield None
        return

    def show(done: int, total: int) -> None:
        click.echo(f"\r{what} {done * 100 // max(total, 1)} %", nl=False, err=True)

    yield show
    click.echo("\r\x1b[K", nl=False, err=True)


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps(value))


def _plain(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict | list):
        return json.dumps(value) if value else "-"
    return str(value)


def _size(count: int | None) -> str:
    value = float(count or 0)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"
