"""Models and datasets of the Hugging Face Hub by name, through `huggingface_hub`: its cache, token and settings."""
