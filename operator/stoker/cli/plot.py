"""`stoker plot`: loss, learning rate and gradient norm of a run, in the terminal or as a PNG.

Called by the table of `main`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import click

from stoker.cli.braille import drawn
from stoker.cli.curves import Curve, read_curves
from stoker.cli.exit_status import WRONG_INPUT

HEIGHT = 8
"""Characters of one curve in the terminal."""


@click.command(epilog="\b\nExample:\n  stoker plot runs/.runs/teach-0/log.jsonl --png loss.png")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--png", type=click.Path(path_type=Path), help="Write a picture instead (needs stoker[plot]).")
@click.option("--json", "as_json", is_flag=True, help="Print the points as JSON instead.")
@click.option("--width", type=click.IntRange(min=24), help="Characters of a line; default: the terminal's.")
def plot(file: Path, png: Path | None, as_json: bool, width: int | None) -> None:
    """Draw loss, validation loss, learning rate and gradient norm of FILE, a metrics log (logging.jsonl)."""
    try:
        curves = read_curves(file)
        if png is not None:
            write_png(curves, png, str(file))
            click.echo(f"wrote {png}")
            return
    except (ValueError, OSError, UnicodeError) as error:
        _refuse(str(error))
    if as_json:
        click.echo(json.dumps({curve.title: {"steps": curve.steps, "values": curve.values} for curve in curves}))
        return
    columns = width or shutil.get_terminal_size().columns
    click.echo("\n\n".join(drawn(curve, columns, HEIGHT) for curve in curves))


def write_png(curves: list[Curve], png: Path, title: str) -> None:
    """Write one picture with a panel for each curve; validation loss goes into the panel of the loss.

    Raises:
        ValueError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--png needs matplotlib: install stoker[plot]") from error
    panels = [curve for curve in curves if curve.title != "validation loss"] or curves
    figure = Figure(figsize=(9, 2.6 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for place, curve in enumerate(panels, start=1):
        axes = figure.add_subplot(len(panels), 1, place)
        axes.plot(curve.steps, curve.values, label=curve.title)
        for other in curves if curve.title == "loss" else ():
            if other.title == "validation loss":
                axes.plot(other.steps, other.values, marker="o", label=other.title)
        axes.set_xlabel("step")
        axes.legend()
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(png, format="png", dpi=120)


def _refuse(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(WRONG_INPUT)
