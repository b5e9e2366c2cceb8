"""Metrics, traces, events and generations that a run writes."""
