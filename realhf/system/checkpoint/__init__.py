"""Checkpoints: worker files, manifest, best models."""
