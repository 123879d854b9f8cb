"""The demo model."""

from __future__ import annotations

ALIAS = "smollm2-135m"
