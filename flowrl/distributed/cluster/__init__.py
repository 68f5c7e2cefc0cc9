"""The Ray cluster of a job, and its slots."""
