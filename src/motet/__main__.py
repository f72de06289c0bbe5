"""`motet`, and `python -m motet`: imports the command line only after Ctrl-C is handled."""

import sys


def main() -> None:
    """Entry point."""
    try:
        from motet.commands.cli import main as commands
        from motet.model import lean_import

        lean_import.allow()
        commands()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
