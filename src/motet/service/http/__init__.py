"""Common parts of all routes: authentication, limits and refusals."""
