"""Attention of packed rows over the paged cache. `backend` is the seat; the rest of the package sits in it."""
