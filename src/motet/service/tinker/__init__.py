"""The routes that the `tinker` package asks: models that clients train, their futures, checkpoints and samples."""
