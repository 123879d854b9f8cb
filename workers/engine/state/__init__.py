"""A request's live state, the KV cache, and the rows of a step."""
