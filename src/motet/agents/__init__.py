"""Agents as environments: each rollout has an OpenAI address of its own, and what goes through it is trained."""
