"""Measures this machine for the cost model."""
