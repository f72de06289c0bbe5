"""The service's database."""
