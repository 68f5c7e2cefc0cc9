"""Data sources: prompts, demonstrations and preferences from files, and samplers."""
