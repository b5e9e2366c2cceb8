"""Decoding by compiled kernels on CPUs."""
