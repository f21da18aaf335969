"""Images in Parquet files: a column of paths or URLs, of bytes, or of both as datasets on the Hugging Face hub have.

Rows are read a few at a time, of the one column that matters.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from usetta.batch.files import SourceError, explained, opened

_AT_ONCE = 64
"""Rows in memory."""


def read_table(file: str, column: str | None = None) -> Iterator[tuple[str, str | bytes]]:
    """Key and place of each image: a path with itself as key, or bytes with the number of their row."""
    parquet = arrow("pyarrow.parquet")
    with opened(file) as binary:
        try:
            table = parquet.ParquetFile(binary)
        except (ValueError, OSError) as error:
            raise SourceError(f"{file} is not a Parquet file: {explained(error)}") from error
        name = _chosen(table.schema_arrow, column, file)
        number = 0
        for batch in table.iter_batches(batch_size=_AT_ONCE, columns=[name]):
            for value in batch.column(0).to_pylist():
                found = (value.get("bytes") or value.get("path")) if isinstance(value, dict) else value
                if isinstance(found, str) and found:
                    yield found, found
                else:
                    yield str(number), found or b""  # which is told as an empty file
                number += 1


def arrow(module: str) -> Any:
    """A module of pyarrow."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"Parquet needs pyarrow: pip install 'usetta[parquet]' ({error})") from None


def _chosen(schema: Any, column: str | None, file: str) -> str:
    """The column that holds images: the one that is named, else the only one of bytes, else the only one of texts."""
    types = arrow("pyarrow").types

    def is_bytes(kind: Any) -> bool:
        inner = [kind.field(i).name for i in range(kind.num_fields)] if types.is_struct(kind) else []
        return bool(types.is_binary(kind) or types.is_large_binary(kind)) or {"bytes", "path"} <= {*inner}

    def is_text(kind: Any) -> bool:
        return bool(types.is_string(kind) or types.is_large_string(kind))

    if column is not None:
        if column not in schema.names:
            raise SourceError(f"{file} has no column {column!r}; it has {', '.join(schema.names)}")
        kind = schema.field(column).type
        if not (is_bytes(kind) or is_text(kind)):
            raise SourceError(f"the column {column!r} of {file} holds neither paths nor bytes but {kind}")
        return column
    for fits in (is_bytes, is_text):
        found = [field.name for field in schema if fits(field.type)]
        if len(found) == 1:
            return str(found[0])
        if found:
            raise SourceError(f"which column of {file} holds the images? Say it with --column: {', '.join(found)}")
    raise SourceError(f"{file} has no column of paths or of bytes; it has {', '.join(schema.names)}")
