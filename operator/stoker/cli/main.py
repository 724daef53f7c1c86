"""The `stoker` command: a table of verbs. Each verb's code is imported when it is called, so that no verb pays for another."""

from __future__ import annotations

import importlib

import click

from stoker.pod.command_line import run_click

VERBS: dict[str, tuple[str, str]] = {
    "local": ("stoker.cli.local:local", "Run manifests on this machine, without Kubernetes."),
    "train": ("stoker.cli.train:train", "Run one training job without an operator."),
    "serve": ("stoker.cli.programs:serve", "Serve a model folder or GGUF file with the OpenAI API."),
    "chat": ("stoker.cli.programs:chat", "Talk to a server."),
    "model": ("stoker.cli.programs:model", "Convert and show models."),
    "checkpoint": ("stoker.cli.programs:checkpoint", "List, verify, show, compare and export checkpoints."),
    "plan": ("stoker.cli.programs:plan", "Memory, time and traffic of a job before it starts (not built yet)."),
    "bench": ("stoker.cli.programs:bench", "Measure throughput and latency (not built yet)."),
    "submit": ("stoker.cli.programs:submit", "Hand manifests to a cluster (not built yet)."),
}


class Verbs(click.Group):
    """Knows every verb's name and one line of help without importing it."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: stoker local apply -f examples/quickstart/",
)
@click.version_option(package_name="stoker", prog_name="stoker")
def stoker() -> None:
    """Trains language models, keeps verified checkpoints, and serves them."""


def main() -> None:
    """Entry point of the program."""
    run_click(stoker, "stoker")


if __name__ == "__main__":
    main()
