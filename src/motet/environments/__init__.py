"""What answers a model in an episode: shipped and own environments, several models at one table, agents over HTTP."""
