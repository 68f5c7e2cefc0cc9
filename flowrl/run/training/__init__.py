"""Training runs: jobs, data, checkpoints, and the run folder."""
