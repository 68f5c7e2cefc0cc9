"""Scoring in PyTorch: log-probs, values and rewards of given tokens."""
