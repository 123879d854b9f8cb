"""A chunk from claim to done: lease, generation, records."""
