"""Engines in plain PyTorch, over any Hugging Face causal LM."""
