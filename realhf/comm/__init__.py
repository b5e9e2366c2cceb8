"""Floor 3: torch.distributed, and nothing else touches it: groups, collectives, point-to-point exchange."""
