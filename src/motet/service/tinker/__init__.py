"""Routes for the `tinker` package: models that clients train, futures, checkpoints and samples."""
