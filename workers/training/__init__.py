"""Training of drafters, with the engine's own modules. The engine never imports it; it knows nothing of jobs."""
