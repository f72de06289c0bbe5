"""The speed bench: Motet and its peers on the same work, taking turns in one run. `python -m bench.speed --help`."""
