"""Level 3: the only package that calls torch.distributed: groups, collectives, point-to-point exchange."""
