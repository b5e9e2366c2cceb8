"""Learning from preference pairs: DPO and related losses."""
