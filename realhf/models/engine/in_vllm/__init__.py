"""Code that runs inside the vLLM process; not imported by the package."""
