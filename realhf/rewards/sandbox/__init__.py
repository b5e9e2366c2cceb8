"""Execution of untrusted Python programs in isolated processes."""
