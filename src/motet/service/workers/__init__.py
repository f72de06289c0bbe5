"""Workers on their owners' machines: they lease work over HTTP, and their results reach the engine."""
