"""Observers of steps: experiment trackers, and what users write themselves."""
