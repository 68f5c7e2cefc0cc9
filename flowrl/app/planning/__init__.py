"""``flowrl plan``: how a job runs, how long a step takes, and whether it fits."""
