"""Gives the engines of a service the event loop of `bench.turns`, where this folder is on the path of Python."""

import sys

if "motet.hosts" in sys.orig_argv:
    from bench.turns import measure_this_process

    measure_this_process()
