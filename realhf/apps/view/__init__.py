"""What users see: console, tables, SVG pictures."""
