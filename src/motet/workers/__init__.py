"""Processes that run users' code, and the sandbox around programs that a model wrote."""
