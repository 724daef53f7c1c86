"""`stoker completion SHELL`: the script that makes a shell complete verbs and options."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")


@click.command(epilog='\b\nExample:\n  eval "$(stoker completion bash)"')
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of a shell."""
    from click.shell_completion import get_completion_class

    root = context.find_root()
    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(root.command, {}, "stoker", "_STOKER_COMPLETE").source())
