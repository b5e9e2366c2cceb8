"""Losses of the actor, and the corrections and penalties in them."""
