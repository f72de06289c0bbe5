"""The kernels, a file for each step of a layer."""
