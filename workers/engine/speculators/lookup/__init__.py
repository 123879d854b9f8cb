"""Drafts looked up in earlier text: n-gram and suffix."""
