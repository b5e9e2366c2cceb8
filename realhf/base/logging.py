"""Log files: one per process, UTC times, no console output."""

import logging
import time
from pathlib import Path


def open_log(path: Path, name: str) -> logging.Logger:
    """Return a logger named ``name`` that appends to ``path``; a second call replaces the handler of the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger(f"realhf.{name}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    formatter.converter = time.gmtime
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    return logger
