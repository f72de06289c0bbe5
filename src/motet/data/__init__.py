"""Rows of problems, read from files and checked before a job begins."""
