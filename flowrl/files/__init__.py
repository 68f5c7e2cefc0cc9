"""Graphs as files and as plain data."""
