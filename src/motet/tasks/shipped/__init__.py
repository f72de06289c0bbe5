"""Environments that ship: what a job names instead of a class of its own."""
