"""The Celery side: app, task, engine host, chunk processing; `workers.engine` is the engine."""
