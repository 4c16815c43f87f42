"""``python -m talkoot``: the command line, for environments without the entry point on their path."""

from talkoot.cli import main

if __name__ == "__main__":
    main()
