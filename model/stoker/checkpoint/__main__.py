"""Entry point of `python -m stoker.checkpoint`, the checkpoint commands of `command`."""

from stoker.checkpoint.command import main

if __name__ == "__main__":
    main()
