"""The only package that calls torch.distributed: groups, collectives, point-to-point exchange."""
