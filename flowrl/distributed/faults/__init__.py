"""Faults of processes: how they are detected and reported."""
