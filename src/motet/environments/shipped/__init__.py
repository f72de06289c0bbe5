"""Built-in environments, which a job names instead of its own class."""
