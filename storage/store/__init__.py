"""The store: every statement that other packages may make, by subject."""
