"""Named adapters: of jobs, uploaded, and shared."""
