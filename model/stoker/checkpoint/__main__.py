"""Entry point of `python -m stoker.checkpoint`, the checkpoint commands of `command`."""

from stoker.pod.collection import imports


def main() -> None:
    """Run the command."""
    with imports():
        from stoker.checkpoint.command import main as command
    command()


if __name__ == "__main__":
    main()
