"""vLLM as a rollout engine."""
