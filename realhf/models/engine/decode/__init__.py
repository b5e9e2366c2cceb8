"""Generation: the slot scheduler, decoding steps, CUDA graphs."""
