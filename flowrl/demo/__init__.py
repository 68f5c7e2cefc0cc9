"""The demonstration: reinforcement learning teaches a small language model to think before it answers."""
