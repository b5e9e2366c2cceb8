"""Math answers: extraction, normalization, comparison."""
