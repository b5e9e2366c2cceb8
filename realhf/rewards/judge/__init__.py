"""Judge processes: pools, deadlines, remote services."""
