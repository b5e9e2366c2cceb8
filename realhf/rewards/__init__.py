"""Judges of responses. Untrusted or slow code runs in child processes that can be killed, not in a worker."""
