"""Floor 0: run paths, logging, timers, seeds, balanced partitions. Imports nothing of the project."""
