"""Carries weights from a trainer to an engine, and proves on either side that they are the same."""
