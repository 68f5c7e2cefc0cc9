"""Losses and the objective that an update minimizes."""
