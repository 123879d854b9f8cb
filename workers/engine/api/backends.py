"""The engines that a job may name as `engine.backend`."""

from __future__ import annotations

ENGINES = {"nightdraft": "workers.engine.async_engine:Engine"}
"""Where each is: a class that is made of an `EngineConfig`, and that is an async context manager which loads the model
and gives the engine (`workers.hosting.interface.HostedEngine`). Another engine is another line."""
