"""Agents as environments: each rollout has its own OpenAI address, and Motet trains what the model samples there."""
