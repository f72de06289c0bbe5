"""Rewards computed outside the job's processes: workers, addresses, judges."""
