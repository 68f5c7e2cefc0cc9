"""Runs side by side: what differs, and what their number supports."""
