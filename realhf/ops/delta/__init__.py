"""The gated delta rule over packed rows and of one token per slot, and the causal convolution before it."""
