"""What happened, to those who watch."""
