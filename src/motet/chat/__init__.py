"""Conversations with a model, in the formats of stock clients: Chat Completions, Responses and Messages."""
