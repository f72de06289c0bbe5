"""Observers of steps: experiment trackers and users' own classes."""
