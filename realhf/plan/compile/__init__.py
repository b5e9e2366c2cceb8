"""From options to an execution plan, and from a plan to a program: pure functions."""
