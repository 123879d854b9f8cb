"""From a model directory, hub id or GGUF file to an executor: sources, checks, weights."""
