"""A smaller model drafts."""
