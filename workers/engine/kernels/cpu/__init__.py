"""Compiled CPU kernels."""
