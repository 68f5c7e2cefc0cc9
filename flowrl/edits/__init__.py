"""Edits: how one graph becomes another, and what has changed."""
