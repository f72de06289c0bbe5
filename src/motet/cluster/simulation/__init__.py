"""Simulate a cluster under a virtual clock, with Motet's own placement, slots and fair shares.

Hosts compute nothing: they only take time. The rate of a completion depends on how many rows the host samples at that moment,
and a step then waits for the trainer of the host. So ten thousand jobs on a thousand hosts take minutes.
"""
