"""Run paths, logging, timers, seeds, balanced partitions. Imports no other package of the project."""
