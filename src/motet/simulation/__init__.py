"""A cluster under a virtual clock: Motet's own placement, slots and fair shares, over hosts that only take time.

A host's completion takes as long as its tokens under the rows that there are at each moment; a step then waits for the host's
trainer. Nothing is computed, so ten thousand jobs on a thousand hosts take minutes.
"""
