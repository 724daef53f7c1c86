"""The `stoker` command: a table of verbs. A verb's module is imported when the verb is called."""

from __future__ import annotations

import importlib

import click

from stoker.pod.command_line import run_click

VERBS: dict[str, tuple[str, str]] = {
    "local": ("stoker.cli.local:local", "Run manifests on this machine without Kubernetes."),
    "train": ("stoker.cli.train:train", "Run one training job on this machine without an operator."),
    "serve": ("stoker.cli.programs:serve", "Serve a model over the OpenAI API."),
    "chat": ("stoker.cli.programs:chat", "Talk to an OpenAI server."),
    "model": ("stoker.cli.programs:model", "Convert and describe models."),
    "checkpoint": ("stoker.cli.programs:checkpoint", "List, verify, show, compare, export, push and pull checkpoints."),
    "kernels": ("stoker.cli.programs:kernels", "Compile GPU kernels ahead of time."),
    "plan": ("stoker.cli.plan:plan", "Memory, traffic and time of a job before it starts."),
    "plot": ("stoker.cli.plot:plot", "Draw the loss, learning rate and gradient norm of a run."),
    "bench": ("stoker.cli.programs:bench", "Measure an engine, or a server under load."),
    "submit": ("stoker.cli.submit:submit", "Create or change objects of a cluster."),
    "get": ("stoker.cli.cluster:get", "List objects of a cluster."),
    "describe": ("stoker.cli.cluster:describe", "Show objects of a cluster with their events."),
    "logs": ("stoker.cli.logs:logs", "Print the logs of a job, deployment or pod."),
    "delete": ("stoker.cli.delete:delete", "Delete objects of a cluster."),
    "save": ("stoker.cli.job_actions:save", "Ask a running job to save now."),
    "suspend": ("stoker.cli.job_actions:suspend", "Suspend a job."),
    "resume": ("stoker.cli.job_actions:resume", "Resume a suspended or finished job."),
    "top": ("stoker.cli.top:top", "Show the GPUs of the nodes, and the jobs that run."),
    "backup": ("stoker.cli.backup:backup", "Print manifests that bring objects back on another cluster."),
    "completion": ("stoker.cli.completion:completion", "Print the completion script of a shell."),
}


class Verbs(click.Group):
    """A group that lists its verbs without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb; one that does not exist is an error with a verb that is near."""
        if args[0] not in VERBS and not args[0].startswith("-") and not ctx.resilient_parsing:
            from stoker.cli.near_match import did_you_mean  # only a mistake needs it

            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], VERBS)}")
        return super().resolve_command(ctx, args)

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
    """Train language models, keep verified checkpoints, and serve them.

    Exit codes: 0 done, 1 failed or not found, 64 wrong command line or manifest, 68 output that cannot be written, 130
    interrupted. Programs that a verb starts (train, serve, chat, model, checkpoint, bench) end with the codes of
    docs/exit-codes.md.
    """


def main() -> None:
    """Entry point of the program."""
    run_click(stoker, "stoker")


def kubectl_main() -> None:
    """Entry point of the plugin `kubectl stoker`."""
    run_click(stoker, "kubectl stoker")


if __name__ == "__main__":
    main()
