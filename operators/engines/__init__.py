"""Operators that call engines: generation, scoring, episodes, teachers."""
