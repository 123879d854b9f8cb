"""Self-speculation: the target drafts for itself with layers left out."""
