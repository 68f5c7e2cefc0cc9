"""Operators that write weights."""
