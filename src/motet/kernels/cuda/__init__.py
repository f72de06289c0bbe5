"""Triton kernels that compute covered bases on a card."""
