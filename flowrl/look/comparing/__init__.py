"""Runs beside each other: what differs, and what of it can be told."""
