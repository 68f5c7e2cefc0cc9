"""``flowrl from-verl``, ``from-trl`` and ``from-openrlhf``."""
