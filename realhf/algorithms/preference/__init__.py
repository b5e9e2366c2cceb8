"""Preference learning: DPO and related losses."""
