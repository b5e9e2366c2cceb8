"""Judges: pools of child processes with a deadline per response, and clients of remote services."""
