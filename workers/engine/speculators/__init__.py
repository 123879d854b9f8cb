"""Speculators: whatever proposes draft trees. The engine never asks which one it has."""
