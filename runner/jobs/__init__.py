"""Submitting, running, following and exporting jobs."""
