"""Training runs: jobs, data, validation, checkpoints, and the run folder."""
