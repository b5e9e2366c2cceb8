"""Level 4: tensors as data; data files; the order in which rows are consumed."""
