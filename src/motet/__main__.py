"""`python -m motet` is `motet`."""

from motet.cli import main

if __name__ == "__main__":
    main()
