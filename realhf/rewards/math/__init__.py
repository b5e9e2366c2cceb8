"""Maths responses: extraction, normalization and comparison of answers."""
