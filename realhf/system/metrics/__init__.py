"""Metrics, traces, events and generations of a run."""
