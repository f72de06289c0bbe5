"""What runs in a process of its own: one file per program that is measured. Only the standard library is imported on top."""
