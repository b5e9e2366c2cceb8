"""Code answers: extraction, execution in the sandbox, comparison of outputs."""
