"""Limits and usage of tenants."""
