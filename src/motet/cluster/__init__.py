"""Hosts: processes that have a base, train and answer on it; and the assignment of jobs to them."""
