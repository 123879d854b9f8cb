"""Before a job: whether it can run, what a draft is worth, calibrations."""
