"""The routes that the `tinker` package asks: sessions that a client drives, their futures, their checkpoints and their samples."""
