"""Reads rows of Parquet files; needs the optional dependency pyarrow."""

import json
from collections.abc import Iterator
from typing import Any

from realhf.base.errors import UserError

MAGIC = b"PAR1"
"""First bytes of a Parquet file."""


def parquet_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as JSON objects: null cells are omitted, dates are text.

    Raises UserError for an invalid file and if pyarrow is not installed.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(f"{path} is a Parquet file, which requires pyarrow: pip install 'realhf[parquet]'") from error
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield json.loads(json.dumps({k: v for k, v in row.items() if v is not None}, default=str))
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {error}") from error
