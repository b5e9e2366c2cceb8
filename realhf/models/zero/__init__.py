"""ZeRO-2 and ZeRO-3 (Rajbhandari et al. 2020, arXiv 1910.02054): memory for gradients and weights, layer by layer."""
