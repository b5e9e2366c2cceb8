"""Cost model: time and memory of instructions, from hardware limits or from a measured profile."""
