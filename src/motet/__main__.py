"""`motet`, and `python -m motet`: the command line is imported where Ctrl-C is heard already."""

import sys


def main() -> None:
    """Entry point."""
    try:
        from motet.cli import main as commands

        commands()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
