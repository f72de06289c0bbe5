"""Workers on machines of their owners: they ask for work, and what they hand in reaches the engine."""
