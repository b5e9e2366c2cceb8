"""Checkpoints: tensors of one worker, the manifest of the whole, best models."""
