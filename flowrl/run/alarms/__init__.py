"""Alarms of a run: rules over its metrics and rows, evaluated after every step."""
