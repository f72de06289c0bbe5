"""What a tenant may submit, and when it starts."""
