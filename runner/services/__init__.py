"""The processes that stay: workers and the scheduler; and the check of what they need."""
