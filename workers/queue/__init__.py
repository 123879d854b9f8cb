"""The Celery side of a worker: app, task, messages."""
