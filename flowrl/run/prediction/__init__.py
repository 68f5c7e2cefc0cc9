"""Predicted step times, from measured costs."""
