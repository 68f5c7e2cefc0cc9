"""Optimizers of trainers, and where they step."""
