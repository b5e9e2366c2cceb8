"""Code responses: extraction of the program, execution in the sandbox, comparison of outputs."""
