"""The scheduler process: dispatching chunks, reaping lost ones, ending jobs."""
