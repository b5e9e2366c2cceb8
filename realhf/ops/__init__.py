"""Floor 3: numeric functions in plain torch; kernels live beside their plain twins. No communication."""
