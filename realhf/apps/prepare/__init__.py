"""From a command line to a launched run: options, checks, planning, processes."""
