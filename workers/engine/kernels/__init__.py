"""Compiled CPU kernels: attention over the paged cache and counter-based noise."""
