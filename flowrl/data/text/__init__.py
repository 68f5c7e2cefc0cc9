"""Tokenizers, chat templates and transcripts."""
