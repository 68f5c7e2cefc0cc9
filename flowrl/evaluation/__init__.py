"""Evaluations: a model answers held-out prompts, without training."""
