"""Machines: their limits (YAML files), measured profiles, and the seconds of work on them."""
