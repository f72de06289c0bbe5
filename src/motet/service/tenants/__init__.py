"""What tenants may use, and what they used."""
