"""Measuring and calibrating drafts on the user's own prompts."""
