"""Shared code of the engines that run external libraries (vLLM, SGLang)."""
