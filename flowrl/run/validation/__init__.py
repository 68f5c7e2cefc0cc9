"""Validations of a run: edits of its graph that score held-out data."""
