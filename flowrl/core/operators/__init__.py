"""Operators: typed ports, roles, sessions, and functions as operators."""
