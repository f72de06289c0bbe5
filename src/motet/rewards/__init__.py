"""Rewards: built in, own code, graders, judges, and those that are computed elsewhere."""
