"""The few values that a column of an input has, found before a job is stored."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from scheduler.intake.dataset import Dataset
from storage.files.scanning import Unreadable, read_rows

MOST_VALUES = 32
READ_ROWS = 4096


def distinct_texts(dataset: Dataset, column: str, most: int = MOST_VALUES) -> list[str]:
    """The texts in a column of the rows of a job, sorted. If there are more than `most`, some more than that, not all.

    Nulls, and rows that cannot be read, have none. Reads that one column.
    """
    found: set[str] = set()
    for file in dataset.files:
        wanted = min(file.num_rows, dataset.num_rows - file.first_row)
        for batch in read_rows(file.path, 0, max(wanted, 0), [column], READ_ROWS):
            rows = batch.rows if isinstance(batch, Unreadable) else batch
            values = rows.column(column)
            if isinstance(values, pa.DictionaryArray):
                values = values.dictionary_decode()
            # As bytes: a text that is no UTF-8 is that row's error, when it is prepared.
            texts = pc.unique(values.cast(pa.large_string()).view(pa.large_binary())).to_pylist()
            found.update(text.decode(errors="replace") for text in texts if text is not None)
            if len(found) > most:
                return sorted(found)
    return sorted(found)
