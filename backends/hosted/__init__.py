"""What the engines share that run code of others (vLLM, SGLang)."""
