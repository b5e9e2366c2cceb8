"""Reward models, ensembles, and process reward models."""
