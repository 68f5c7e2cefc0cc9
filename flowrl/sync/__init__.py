"""Weights on their way from a trainer to an engine, with a digest and a probe on either side."""
