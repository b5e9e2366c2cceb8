"""Profiles of machines: their files, the jobs that measure several machines, and how runs use them."""
