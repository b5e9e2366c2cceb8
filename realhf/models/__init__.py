"""Floor 4: the packed transformer, its flat parameters and caches, and Hugging Face folders."""
