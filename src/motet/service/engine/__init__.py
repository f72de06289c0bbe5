"""The HTTP process's end of the engine."""
