"""From chunk to results: the Celery side, chunks, rows, engine hosting; `workers.engine` is the engine."""

CHUNKS_IN_FLIGHT = 3
"""Chunks at a time in one process, unless it is told otherwise. They share one engine: while one runs out of rows, the
others keep the running batch full."""
