"""``flowrl evaluate``: a model, or that of a run, answers held-out prompts."""
