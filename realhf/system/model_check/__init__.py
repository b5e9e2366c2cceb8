"""``realhf model check``: a model of a folder against transformers."""
