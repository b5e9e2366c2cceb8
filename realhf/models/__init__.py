"""The packed transformer, its flat parameters and caches, Hugging Face folders, and engines."""
