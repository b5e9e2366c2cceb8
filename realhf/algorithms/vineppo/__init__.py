"""VinePPO: Monte-Carlo values of intermediate states."""
