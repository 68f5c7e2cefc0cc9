"""Sampling in PyTorch with a KV cache."""
