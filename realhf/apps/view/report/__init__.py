"""The page of ``realhf report``: reads run directories, draws charts, renders one HTML file, and serves it."""
