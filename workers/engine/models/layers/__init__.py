"""Linear and expert layers whose rows do not depend on each other, and their precision."""
