"""Kills processes of Motet at random, and compares what is left: `python -m bench.kills --help`."""
