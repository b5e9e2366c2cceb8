"""Tensors as data; data files; the order in which rows are consumed."""
