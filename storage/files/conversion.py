"""What to do with prompts that are in another format than Parquet."""

from __future__ import annotations

import json
import shlex
from pathlib import PurePosixPath

_READERS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
}
_PACKED = (".gz", ".bz2")
"""pyarrow decompresses these by their name."""


def remedy(path: str) -> str:
    """A sentence with the command that makes a Parquet file of this one; "" for a format that pyarrow cannot read."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(path).suffixes]
    packed = bool(suffixes) and suffixes[-1] in _PACKED
    kind = suffixes[-2 if packed else -1] if len(suffixes) > packed else ""
    if kind not in _READERS:
        return ""
    module = _READERS[kind]
    options = ""
    if module == "csv":
        delimiter = ', delimiter="\\t"' if kind == ".tsv" else ""
        options = f", parse_options=r.ParseOptions(newlines_in_values=True{delimiter})"
    name = json.dumps(path, ensure_ascii=False)
    target = json.dumps(path[: -sum(map(len, suffixes[-1 - packed :]))] + ".parquet", ensure_ascii=False)
    code = (
        f"import pyarrow.{module} as r, pyarrow.parquet as p; p.write_table(r.read_{module}({name}{options}), {target})"
    )
    return f"; prompts are read from Parquet, so convert it first: python -c {shlex.quote(code)}"
