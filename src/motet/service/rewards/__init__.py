"""Rewards that the engine asks for: workers, addresses, judges."""
