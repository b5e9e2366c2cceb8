"""Console output, tables and SVG charts."""
