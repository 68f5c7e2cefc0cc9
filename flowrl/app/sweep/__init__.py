"""``flowrl sweep``: a training with other settings, many times."""
