"""Isolation of processes that run untrusted code."""
