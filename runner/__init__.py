"""The composition root: job specs, the command line, live progress, the in-process run."""
