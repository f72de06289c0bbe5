"""Agents as environments: each rollout has its own OpenAI address, and Motet trains on the tokens sampled there."""
