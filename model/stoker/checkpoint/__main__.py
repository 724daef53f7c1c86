"""`python -m stoker.checkpoint`."""

from stoker.checkpoint.command import main

if __name__ == "__main__":
    main()
