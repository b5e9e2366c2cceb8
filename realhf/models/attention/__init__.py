"""Attention of a stage: rotary embeddings of its blocks, the attention of its passes, latent attention."""
