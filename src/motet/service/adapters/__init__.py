"""Adapters by name: of jobs, uploaded, and shared."""
