"""What several drafting methods use."""
