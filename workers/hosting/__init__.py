"""Engines in threads of their own, shared by the chunks of a worker."""
