"""SGLang as a rollout engine."""
