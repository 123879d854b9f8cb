"""From flags and a job file to one job spec."""
