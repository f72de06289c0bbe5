"""Submission, validation and start of jobs."""
