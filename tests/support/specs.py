"""The smallest spec of a job."""

from __future__ import annotations

from typing import Any

MINIMAL: dict[str, Any] = {"input": {"paths": ["a.parquet"]}, "engine": {"target": "m"}}
