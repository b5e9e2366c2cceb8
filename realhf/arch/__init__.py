"""What a model is: parameter specs, FLOP counts, Hugging Face configs, families. Torch-free."""
