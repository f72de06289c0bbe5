"""HTTP routes, one file per kind of object."""
