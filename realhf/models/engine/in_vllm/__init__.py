"""What runs inside of vLLM's own process: on its path alone, and imported by nothing here."""
