"""Level 10: the command line."""
