"""Option checks and reward wiring shared by experiments."""
