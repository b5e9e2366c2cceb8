"""Rows of Parquet files, as data sets are stored on hubs. pyarrow reads them, where it is installed."""

import json
from collections.abc import Iterator
from typing import Any

from realhf.base.errors import UserError

MAGIC = b"PAR1"
"""What a Parquet file begins with."""


def parquet_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as JSON has them: a cell that is null is not there, a date is text.

    UserError where the file is broken, or there is no pyarrow.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise UserError(f"{path} is a Parquet file, which pyarrow reads: pip install 'realhf[parquet]'") from error
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield json.loads(json.dumps({k: v for k, v in row.items() if v is not None}, default=str))
    except (ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {error}") from error
