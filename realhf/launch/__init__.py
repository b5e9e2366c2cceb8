"""Floor 7: start, poll and stop the processes of a run. One file per way of launching."""
