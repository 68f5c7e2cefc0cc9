"""The memory that engines on torch models take, from a configuration alone: no weights are read."""
