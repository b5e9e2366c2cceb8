"""Rewards from a language model behind an OpenAI-compatible endpoint."""
