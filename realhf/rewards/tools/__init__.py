"""Tools of multi-turn rollouts that need the sandbox or the verifiers. Imports no torch."""
