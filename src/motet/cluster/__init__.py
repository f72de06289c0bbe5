"""Hosts: the processes that have a base each and train and answer on it, and which job is on which of them."""
